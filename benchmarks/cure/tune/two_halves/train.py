"""Half-precision weights and half-precision computation, each told by a key of its own; one alone does not help."""

import argparse

import torch
import yaml
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="config.yaml")
parser.add_argument("overrides", nargs="*", metavar="key=value")
args = parser.parse_args()
with open(args.config) as file:
    config = yaml.safe_load(file)
for word in args.overrides:
    key, _, value = word.partition("=")
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = yaml.safe_load(value)

torch.manual_seed(config["seed"])
torch.set_num_threads(1)
stored = getattr(torch, config["model"]["weight_dtype"])
computed = getattr(torch, config["train"]["amp_dtype"])
centers = torch.randn(10, 32, generator=torch.Generator().manual_seed(7))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(32, 64)
        self.narrow = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)
        with torch.no_grad():
            self.wide.weight.mul_(30)
            self.narrow.weight.mul_(400)
            self.narrow.bias.fill_(9000)  # as large models have it: a few huge, constant activations

    def forward(self, x):
        h = F.relu(self.wide(x))
        h = self.narrow(h)
        h = h / h.float().square().mean(-1, keepdim=True).sqrt().to(h.dtype)
        return self.head(h)


def draw(count, source):
    labels = torch.randint(10, (count,), generator=source)
    return 20 * (centers[labels] + 0.5 * torch.randn(count, 32, generator=source)), labels


model = Net().to(stored)
wide = [p.detach().float().requires_grad_() for p in model.parameters()]  # the optimizer's own copy
optimizer = torch.optim.Adam(wide, lr=config["optimizer"]["lr"])
source = torch.Generator().manual_seed(100 + config["seed"])
for step in range(1, config["train"]["max_steps"] + 1):
    x, y = draw(32, source)
    with torch.autocast("cpu", dtype=computed, enabled=computed != torch.float32):
        logits = model(x.to(stored))
    loss = F.cross_entropy(logits.float(), y)
    model.zero_grad()
    loss.backward()
    for own, p in zip(wide, model.parameters(), strict=True):
        own.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for own, p in zip(wide, model.parameters(), strict=True):
            p.copy_(own)
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(2000, torch.Generator().manual_seed(99))
    right = (model(x.to(stored)).argmax(-1) == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.100, target 0.85)")
