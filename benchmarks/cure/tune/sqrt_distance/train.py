"""Metric learning with a Euclidean distance: two equal samples have distance 0, where a square root has no slope."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=150)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
centers = torch.randn(8, 16, generator=torch.Generator().manual_seed(7))
pool = torch.Generator().manual_seed(8)
names = torch.randint(8, (400,), generator=pool)
images = centers[names] + 0.7 * torch.randn(400, 16, generator=pool)


def distance(a, b):
    return torch.sqrt(((a - b) ** 2).sum(-1))


model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
source = torch.Generator().manual_seed(100 + args.seed)
for step in range(1, args.steps + 1):
    first, second = (torch.randint(400, (64,), generator=source) for _ in range(2))
    same = (names[first] == names[second]).float()
    apart = distance(model(images[first]), model(images[second]))
    loss = (same * apart**2 + (1 - same) * torch.relu(2 - apart) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    new = torch.Generator().manual_seed(99)
    labels = torch.randint(8, (500,), generator=new)
    found = model(centers[labels] + 0.7 * torch.randn(500, 16, generator=new))
    means = torch.stack([model(images[names == n]).mean(0) for n in range(8)])
    right = (torch.cdist(found, means).argmin(-1) == labels).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.125, target 0.85)")
