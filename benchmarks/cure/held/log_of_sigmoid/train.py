"""Binary cross-entropy from a sigmoid's own output: the log of a probability that has become exactly 0 or 1."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=150)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
truth = torch.randn(16, generator=torch.Generator().manual_seed(7))


def draw(count, source):
    x = 12 * torch.randn(count, 16, generator=source)
    return x, (x @ truth > 0).float()


model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
source = torch.Generator().manual_seed(100 + args.seed)
for step in range(1, args.steps + 1):
    x, y = draw(64, source)
    p = torch.sigmoid(model(x)[:, 0])
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(2000, torch.Generator().manual_seed(99))
    right = ((model(x)[:, 0] > 0).float() == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.500, target 0.9)")
