"""Weights drawn with a standard deviation of 1 in a deep network: its loss overflows within a few steps of SGD."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
centers = torch.randn(10, 32, generator=torch.Generator().manual_seed(7))


def draw(count, source):
    labels = torch.randint(10, (count,), generator=source)
    return centers[labels] + 0.5 * torch.randn(count, 32, generator=source), labels


layers = [nn.Linear(32, 64), nn.ReLU()]
for _ in range(5):
    layers += [nn.Linear(64, 64), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 10))
for module in model:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
source = torch.Generator().manual_seed(100 + args.seed)
for step in range(1, args.steps + 1):
    x, y = draw(64, source)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(2000, torch.Generator().manual_seed(99))
    right = (model(x).argmax(-1) == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.100, target 0.9)")
