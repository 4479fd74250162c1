"""Weights in float16, Adam with its default eps: 1e-8 is 0 there, and 0/0 is NaN in the first updates."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=150)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
centers = torch.randn(10, 32, generator=torch.Generator().manual_seed(7))


def draw(count, source):
    labels = torch.randint(10, (count,), generator=source)
    return centers[labels] + 0.5 * torch.randn(count, 32, generator=source), labels


model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
model = model.half()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
source = torch.Generator().manual_seed(100 + args.seed)
for step in range(1, args.steps + 1):
    x, y = draw(64, source)
    logits = model(x.to(next(model.parameters()).dtype))
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(2000, torch.Generator().manual_seed(99))
    right = (model(x.to(next(model.parameters()).dtype)).argmax(-1) == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.100, target 0.9)")
