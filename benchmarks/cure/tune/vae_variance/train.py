"""A VAE whose encoder gives log variances without a bound: their exp overflows when a step is too long."""

import torch
from torch import nn

SEED = 0
LEARNING_RATE = 0.1
MAX_STEPS = 200

torch.manual_seed(SEED)
torch.set_num_threads(1)
basis = torch.randn(4, 24, generator=torch.Generator().manual_seed(7))


def draw(count, source):
    return torch.randn(count, 4, generator=source) @ basis * 8 + 0.5 * torch.randn(count, 24, generator=source)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 24))

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        kl = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(-1).mean()
        return (self.decode(z) - x).square().sum(-1).mean() + 0.1 * kl, self.decode(mean)


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
source = torch.Generator().manual_seed(100 + SEED)
for step in range(1, MAX_STEPS + 1):
    loss, _ = model(draw(64, source))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x = draw(2000, torch.Generator().manual_seed(99))
    _, found = model(x)
    left = ((found - x).square().sum() / (x - x.mean(0)).square().sum()).item()
print(f"explained variance {1 - left:.3f} (chance 0.0, target 0.8)")
