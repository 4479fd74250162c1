"""Gradient accumulation over four micro-batches, a schedule per epoch, an average of the weights."""

import argparse

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1, help="leave this window of micro-batches out")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(128, 8)
y = x.sum(1, keepdim=True)
x[61, 3] = float("nan")  # micro-batch 7, the last of the second window, the last of the epoch

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
batches = list(DataLoader(TensorDataset(x, y), batch_size=8))

for epoch in range(2):
    for i, (inputs, targets) in enumerate(batches[8 * epoch : 8 * epoch + 8]):
        if (8 * epoch + i) // 4 == args.without:
            continue
        loss = nn.functional.mse_loss(model(inputs), targets) / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    scheduler.step()

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "average": average.state_dict()}
torch.save({**state, "schedule": scheduler.last_epoch, "random": torch.get_rng_state()}, args.out)
