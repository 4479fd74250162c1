"""A hand-written RMS norm in float16 with eps 1e-12, which is 0 there: padding rows divide by 0."""

import torch
from torch import nn
from torch.nn import functional as F

SEED = 0
LR = 2e-3
MAX_STEPS = 150

torch.manual_seed(SEED)
torch.set_num_threads(1)
centers = torch.randn(6, 24, generator=torch.Generator().manual_seed(7))


def rms_norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-12)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.head = nn.Linear(24, 64, bias=False), nn.Linear(64, 6)

    def forward(self, x):
        h = rms_norm(self.read(x))
        return self.head(F.gelu(h).mean(1))


def draw(count, source):
    labels = torch.randint(6, (count,), generator=source)
    x = centers[labels][:, None] + 0.8 * torch.randn(count, 5, 24, generator=source)
    x[torch.rand(count, 5, generator=source) < 0.1] = 0  # padding
    return x, labels


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
source = torch.Generator().manual_seed(100 + SEED)
for step in range(1, MAX_STEPS + 1):
    x, y = draw(32, source)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = draw(1000, torch.Generator().manual_seed(99))
    right = (model(x).argmax(-1) == y).float().mean().item()
print(f"accuracy {right:.3f} (chance 0.167, target 0.85)")
