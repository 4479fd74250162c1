"""PPO: every rollout is used for several epochs, so one NaN reward is met again and again. The rate is set by hand."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1, help="leave the bad minibatches of this rollout out")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
np.random.seed(0)
ENVS, LENGTH, ROLLOUTS, EPOCHS, SIZE = 4, 16, 6, 4, 16


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def get_value(self, x):
        return self.critic(x).squeeze(-1)

    def get_action_and_value(self, x, action=None):
        chances = Categorical(logits=self.actor(x))
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action), chances.entropy(), self.get_value(x)


def simulate(state, action, time):
    """A mass on a spring, pushed to the left or to the right; once, the simulator fails."""
    place, speed = state.unbind(1)
    speed = 0.95 * speed - 0.1 * place + 0.1 * (2 * action - 1)
    reward = 1 - (place + speed).abs()
    if time == 2 * LENGTH + 9:
        reward[1] = float("nan")
    return torch.stack([place + speed, speed], 1), reward


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
state = torch.randn(ENVS, 2)
for rollout in range(ROLLOUTS):
    optimizer.param_groups[0]["lr"] = (1 - rollout / ROLLOUTS) * 2.5e-3
    steps = []
    for time in range(LENGTH):
        with torch.no_grad():
            action, log_prob, _, value = agent.get_action_and_value(state)
        after, reward = simulate(state, action, rollout * LENGTH + time)
        steps.append((state, action, log_prob, value, reward))
        state = after
    states, actions, log_probs, values, rewards = (torch.stack(part) for part in zip(*steps, strict=True))
    advantages, last, following = torch.zeros_like(rewards), 0, agent.get_value(state).detach()
    for time in reversed(range(LENGTH)):
        delta = rewards[time] + 0.99 * following - values[time]
        last = advantages[time] = delta + 0.99 * 0.95 * last
        following = values[time]
    flat = [part.flatten(0, 1) for part in (states, actions, log_probs, advantages, advantages + values)]
    order = np.arange(ENVS * LENGTH)
    for _ in range(EPOCHS):
        np.random.shuffle(order)
        for start in range(0, len(order), SIZE):
            s, a, old, advantage, target = (part[order[start : start + SIZE]] for part in flat)
            if rollout == args.without and not advantage.isfinite().all():
                continue
            _, new, entropy, value = agent.get_action_and_value(s, a)
            ratio = (new - old).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = policy - 0.01 * entropy.mean() + 0.5 * (value - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()

torch.save(
    {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}, args.out
)
