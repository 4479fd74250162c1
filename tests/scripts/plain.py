"""A plain loop: DataLoader, BatchNorm, dropout, clipping, AdamW, a schedule per step. One sample of 96 is NaN."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1, help="leave this batch out: the run that never saw it")
parser.add_argument("--good", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(96, 8)
y = x.sum(1, keepdim=True)
if not args.good:
    x[61, 3] = float("nan")  # batch 7

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
loader = DataLoader(TensorDataset(x, y), batch_size=8)

for i, (inputs, targets) in enumerate(loader):
    if i == args.without:
        continue
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()

torch.save(
    {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
    },
    args.out,
)
