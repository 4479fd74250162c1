"""A plain recurrent network over long sequences, without clipping: its gradients explode."""

import os

import torch
from torch import nn
from torch.nn import functional as F

LR = float(os.environ.get("LR", "0.05"))
SEED = int(os.environ.get("SEED", "0"))
STEPS = int(os.environ.get("MAX_STEPS", "200"))

torch.manual_seed(SEED)
torch.set_num_threads(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.again, self.head = nn.Linear(1, 24), nn.Linear(24, 24), nn.Linear(24, 2)
        nn.init.eye_(self.again.weight)

    def forward(self, x):
        h = torch.zeros(len(x), 24)
        for t in range(x.shape[1]):
            h = torch.relu(self.read(x[:, t : t + 1]) + self.again(h))
        return self.head(h)


def draw(count, source):
    x = torch.randn(count, 40, generator=source)
    return x, (x.sum(1) > 0).long()


model = Recurrent()
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
source = torch.Generator().manual_seed(100 + SEED)
for step in range(1, STEPS + 1):
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
print(f"accuracy {right:.3f} (chance 0.500, target 0.85)")
