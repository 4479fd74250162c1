"""A loop of one's own on Accelerate: accumulation over two batches, clipping, a prepared schedule."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1, help="leave this window of two batches out")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(128, 8)
y = x.sum(1, keepdim=True)
x[61, 3] = float("nan")
if args.without >= 0:
    keep = [i for i in range(128) if i // 16 != args.without]
    x, y = x[keep], y[keep]

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 16)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
torch.manual_seed(1)

for inputs, targets in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": scheduler.scheduler.last_epoch}
torch.save({**state, "random": torch.get_rng_state()}, args.out)
