"""Regression by plain SGD; the learning rate comes from config.yaml and is far too high for the scale of the inputs."""

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
truth = torch.randn(16, 1, generator=torch.Generator().manual_seed(7))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=config["optimizer"]["lr"], momentum=0.9)
source = torch.Generator().manual_seed(100 + config["seed"])
for step in range(1, config["train"]["max_steps"] + 1):
    x = 3 * torch.randn(64, 16, generator=source)
    y = torch.tanh(x @ truth) * 5
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x = 3 * torch.randn(2000, 16, generator=torch.Generator().manual_seed(99))
    y = torch.tanh(x @ truth) * 5
    left = (F.mse_loss(model(x), y) / y.var()).item()
print(f"explained variance {1 - left:.3f} (chance 0.0, target 0.8)")
