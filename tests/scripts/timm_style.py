"""A loop like timm's: groups without weight decay, an average and a schedule that are classes of its own.

Nobody can know what they are for: after a skipped step they move on, and that is said.
"""

import argparse
import copy
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1, help="do not train on this batch; average and schedule move on")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
images = torch.rand(96, 1, 8, 8)
labels = (images.mean((1, 2, 3)) > 0.5).long()
images[61, 0, 2, 2] = float("inf")


class WeightAverage(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mean, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(self.decay * mean + (1 - self.decay) * value)


class Cosine:
    def __init__(self, optimizer, length):
        self.optimizer, self.length = optimizer, length
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def step_update(self, num_updates):
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = 0.5 * rate * (1 + math.cos(math.pi * num_updates / self.length))


model = nn.Sequential(
    nn.Conv2d(1, 8, 3, 2, 1, bias=False),
    nn.BatchNorm2d(8),
    nn.SiLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Dropout(0.1),
    nn.Linear(8, 2),
)
plain = [p for p in model.parameters() if p.ndim < 2]
decayed = [p for p in model.parameters() if p.ndim >= 2]
optimizer = torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.05}], 1e-2)
average, schedule = WeightAverage(model), Cosine(optimizer, 12)
loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)

for i, (x, y) in enumerate(DataLoader(TensorDataset(images, labels), batch_size=8)):
    if i != args.without:
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    average.update(model)
    schedule.step_update(num_updates=i + 1)

state = {"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
torch.save({**state, "random": torch.get_rng_state()}, args.out)
