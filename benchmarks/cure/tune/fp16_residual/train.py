"""A deep residual network under float16 autocast, no normalization: its activations leave the format.

After "NaN loss with fp16, fine with bf16" threads: a residual stream that grows from block to block.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
centers = torch.randn(10, 32, generator=torch.Generator().manual_seed(7))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x):
        h = self.read(x)
        for block in self.blocks:
            h = h + 4 * block(h)
        return self.head(self.norm(h.float()))


def draw(count, source):
    labels = torch.randint(10, (count,), generator=source)
    return centers[labels] + 0.5 * torch.randn(count, 32, generator=source), labels


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
source = torch.Generator().manual_seed(100 + args.seed)
for step in range(1, args.steps + 1):
    x, y = draw(32, source)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x * 3000)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(2000, torch.Generator().manual_seed(99))
    right = (model(x * 3000).argmax(-1) == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.100, target 0.9)")
