"""A classifier with an entropy bonus written as p * log(p): a probability that becomes 0 gives 0 * -inf."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=150)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
centers = torch.randn(10, 32, generator=torch.Generator().manual_seed(7))


def draw(count, source):
    labels = torch.randint(10, (count,), generator=source)
    return 15 * (centers[labels] + 0.5 * torch.randn(count, 32, generator=source)), labels


def entropy(logits):
    p = F.softmax(logits, dim=-1)
    return -(p * torch.log(p)).sum(-1).mean()


model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
source = torch.Generator().manual_seed(100 + args.seed)
for step in range(1, args.steps + 1):
    x, y = draw(64, source)
    logits = model(x)
    loss = F.cross_entropy(logits, y) - 0.01 * entropy(logits)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(2000, torch.Generator().manual_seed(99))
    right = (model(x).argmax(-1) == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.100, target 0.9)")
