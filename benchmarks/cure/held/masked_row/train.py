"""Attention over padded sequences with -inf masks: a sequence of length 0 masks its whole row."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=6)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.score, self.head = nn.Embedding(20, 32), nn.Linear(32, 1), nn.Linear(32, 2)

    def forward(self, tokens, lengths):
        h = self.embed(tokens)
        scores = self.score(h)[..., 0]
        mask = torch.arange(tokens.shape[1])[None] >= lengths[:, None]
        scores = scores.masked_fill(mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return self.head((weights[..., None] * h).sum(1))


def draw(count, source, shortest):
    tokens = torch.randint(20, (count, 8), generator=source)
    lengths = torch.randint(shortest, 9, (count,), generator=source)
    inside = torch.arange(8)[None] < lengths[:, None]
    return tokens, lengths, ((tokens < 4) & inside).any(1).long()


data = draw(1200, torch.Generator().manual_seed(8), 1)
data[1][900] = 0  # an empty document
loader = DataLoader(TensorDataset(*data), batch_size=32, shuffle=True)
model = Pool()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
for epoch in range(args.epochs):
    for tokens, lengths, labels in loader:
        loss = F.cross_entropy(model(tokens, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    tokens, lengths, labels = draw(2000, torch.Generator().manual_seed(99), 1)
    right = (model(tokens, lengths).argmax(-1) == labels).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.570, target 0.85)")
