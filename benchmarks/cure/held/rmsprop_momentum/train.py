"""RMSprop with a tiny eps from the environment's defaults: coordinates whose gradients vanish take huge steps."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--eps", type=float, default=1e-30)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
centers = torch.randn(10, 32, generator=torch.Generator().manual_seed(7))


def draw(count, source):
    labels = torch.randint(10, (count,), generator=source)
    return centers[labels] + 0.3 * torch.randn(count, 32, generator=source), labels


model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr, alpha=0.5, momentum=0.95, eps=args.eps)
source = torch.Generator().manual_seed(100 + args.seed)
for step in range(1, args.steps + 1):
    x, y = draw(64, source)
    logits = model(x)
    loss = (logits.exp().sum(-1).log() - logits[torch.arange(64), y]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(2000, torch.Generator().manual_seed(99))
    right = (model(x).argmax(-1) == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.100, target 0.9)")
