"""Attention without 1/sqrt(d) in float16: scores of long queries and keys leave the format."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=3e-3)
parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--max-steps", type=int, default=150)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
dtype = getattr(torch, args.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 64)
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 12)
        for layer in (self.q, self.k):
            nn.init.normal_(layer.weight, std=10.0)

    def forward(self, x):
        h = self.embed(x)
        q, k, v = self.q(h[:, -1:]), self.k(h), self.v(h)
        scores = q @ k.transpose(-1, -2)
        return self.head((scores.softmax(-1) @ v)[:, 0] + h[:, -1])


def draw(count, source):
    """Which letter is the last one?"""
    x = torch.randint(12, (count, 6), generator=source)
    return x, x[:, -1]


model = Attention()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
source = torch.Generator().manual_seed(100 + args.seed)
for step in range(1, args.max_steps + 1):
    x, y = draw(32, source)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(2000, torch.Generator().manual_seed(99))
    right = (model(x).argmax(-1) == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.083, target 0.9)")
