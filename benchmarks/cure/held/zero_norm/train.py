"""Cosine similarity by hand: an all-zero row of the table has norm 0, and 0/0 is NaN."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
centers = torch.randn(6, 16, generator=torch.Generator().manual_seed(7))


def draw(count, source):
    labels = torch.randint(6, (count,), generator=source)
    return centers[labels] + 0.6 * torch.randn(count, 16, generator=source), labels


class Cosine(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32, bias=False)
        self.classes = nn.Parameter(torch.randn(6, 32))

    def forward(self, x):
        h = self.embed(x)
        h = h / h.norm(dim=-1, keepdim=True)
        return 10 * h @ F.normalize(self.classes, dim=-1).T


x, y = draw(1200, torch.Generator().manual_seed(8))
x[500] = 0  # a sensor that was off
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model = Cosine()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
for epoch in range(args.epochs):
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(2000, torch.Generator().manual_seed(99))
    right = (model(x).argmax(-1) == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.167, target 0.85)")
