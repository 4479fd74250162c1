"""Policy gradients with an importance ratio exp(new - old): one unlikely action, and the ratio overflows."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3.0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--num-steps", type=int, default=150)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
truth = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))


def best(states):
    return (states @ truth).argmax(-1)


policy = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(policy.parameters(), lr=args.lr, momentum=0.9)
source = torch.Generator().manual_seed(100 + args.seed)
for step in range(1, args.num_steps + 1):
    states = 4 * torch.randn(64, 8, generator=source)
    if step % 4 == 1:
        with torch.no_grad():
            old_policy = [p.clone() for p in policy.parameters()]
    with torch.no_grad():
        names = [name for name, _ in policy.named_parameters()]
        old = torch.func.functional_call(policy, dict(zip(names, old_policy, strict=True)), states)
        actions = torch.multinomial(old.softmax(-1), 1, generator=source)[:, 0]
        old_logp = old.log_softmax(-1)[torch.arange(64), actions]
        reward = (actions == best(states)).float() - 0.25
    logp = policy(states).log_softmax(-1)[torch.arange(64), actions]
    ratio = torch.exp(logp - old_logp)
    loss = -(ratio * reward).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    states = 4 * torch.randn(2000, 8, generator=torch.Generator().manual_seed(99))
    right = (policy(states).argmax(-1) == best(states)).float().mean().item()
print(f"best actions {right:.3f} (chance 0.250, target 0.7)")
