"""A compiled model, a scheduler of the script's own, and an optimizer step that is compiled too."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1)
parser.add_argument("--how", choices=["wrapped", "in-place", "step", "function"], default="wrapped")
args = parser.parse_args()


class Halving(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        return [base * 0.5**self.last_epoch for base in self.base_lrs]


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(96, 8)
y = x.sum(1, keepdim=True)
x[61, 3] = float("nan")

net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = Halving(optimizer)
model, step = net, optimizer.step
if args.how == "wrapped":
    model = torch.compile(net, backend="eager")
elif args.how == "in-place":
    net.compile(backend="eager")
elif args.how == "step":
    step = torch.compile(optimizer.step, backend="eager")
else:

    @torch.compile(backend="eager")
    def step():
        optimizer.step()


for i, (inputs, targets) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
    if i == args.without:
        continue
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    step()
    scheduler.step()

state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": scheduler.last_epoch}
torch.save({**state, "random": torch.get_rng_state()}, args.out)
