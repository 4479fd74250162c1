"""A table with one row of NaN: the first batch that draws it ends the training."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
centers = torch.randn(5, 16, generator=torch.Generator().manual_seed(7))


def draw(count, source):
    labels = torch.randint(5, (count,), generator=source)
    return centers[labels] + torch.randn(count, 16, generator=source), labels


x, y = draw(1200, torch.Generator().manual_seed(8))
x[777, 3] = float("nan")
train_set = TensorDataset(x, y)
loader = DataLoader(train_set, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
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
print(f"accuracy {right:.3f} (chance 0.200, target 0.85)")
