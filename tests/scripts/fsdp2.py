"""Sharded data parallel (FSDP2) in the style of torchtitan: containers of optimizers and schedules, accumulation,
clipping by the norm over all shards, distributed checkpoints. Each rank meets a bad sample once."""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", action="store_true", help="leave the two bad steps out")
args = parser.parse_args()
BAD = [(4, 0), (7, 1)]  # the step, and the rank that meets a bad sample in it


class Optimizers:
    """One optimizer for each part of the model, stepped together."""

    def __init__(self, parts):
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.parts = [nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 1))]
        for part in self.parts:
            fully_shard(part)
        self.optimizers = Optimizers(self.parts)
        self.schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, 12) for o in self.optimizers.optimizers]
        self.data = torch.Generator().manual_seed(dist.get_rank())
        torch.manual_seed(dist.get_rank())

    def batch(self, bad):
        inputs = torch.randn(8, 8, generator=self.data)
        targets = inputs.sum(1, keepdim=True)
        if bad:
            inputs[3, 2] = float("nan")
        return inputs, targets

    def forward_backward(self, inputs, targets):
        hidden = self.parts[0](inputs)
        loss = nn.functional.mse_loss(self.parts[1](hidden), targets) / 2
        loss.backward()

    def clip(self, max_norm):
        parameters = [p for part in self.parts for p in part.parameters()]
        total = nn.utils.get_total_norm([p.grad for p in parameters])
        total = total.full_tensor() if isinstance(total, DTensor) else total
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)

    def train_step(self, number):
        batches = [self.batch(i == 1 and (number, dist.get_rank()) in BAD) for i in range(2)]
        if args.without and number in dict(BAD):
            return
        self.optimizers.zero_grad()
        for inputs, targets in batches:
            self.forward_backward(inputs, targets)
        self.clip(1.0)
        self.optimizers.step()
        for schedule in self.schedules:
            schedule.step()


torch.set_num_threads(1)
dist.init_process_group("gloo")
trainer = Trainer()
for number in range(12):
    trainer.train_step(number)

model = nn.ModuleList(trainer.parts)
shards = {n: p.to_local().detach().clone() for n, p in model.named_parameters()}
schedules = [s.last_epoch for s in trainer.schedules]
torch.save({"model": shards, "schedules": schedules, "random": torch.get_rng_state()}, f"{args.out}.{dist.get_rank()}")
dcp.save({"model": model.state_dict()}, checkpoint_id=f"{args.out}.dcp")
dist.destroy_process_group()
