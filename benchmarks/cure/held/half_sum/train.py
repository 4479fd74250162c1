"""A mean over many positions computed as a float16 sum, then divided: the sum leaves the format first."""

import argparse

import torch
import yaml
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="config.yaml")
args = parser.parse_args()
with open(args.config) as file:
    config = yaml.safe_load(file)

torch.manual_seed(config["seed"])
torch.set_num_threads(1)
dtype = getattr(torch, config["precision"]["torch_dtype"])
centers = torch.randn(6, 16, generator=torch.Generator().manual_seed(7))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.head = nn.Linear(16, 32), nn.Linear(32, 6)

    def forward(self, x):
        h = F.softplus(self.read(x)).square()
        total = h.sum(1) / x.shape[1]
        return self.head(torch.log1p(total))


def draw(count, source):
    labels = torch.randint(6, (count,), generator=source)
    return 6 * (centers[labels][:, None] + torch.randn(count, 400, 16, generator=source)), labels


model = Net().to(dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=config["optimizer"]["lr"], momentum=0.9)
source = torch.Generator().manual_seed(100 + config["seed"])
for step in range(1, config["max_steps"] + 1):
    x, y = draw(16, source)
    loss = F.cross_entropy(model(x.to(dtype)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(300, torch.Generator().manual_seed(99))
    right = (model(x.to(dtype)).argmax(-1) == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.167, target 0.85)")
