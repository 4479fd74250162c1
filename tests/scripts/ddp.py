"""Data parallel over the processes that torchrun started; each rank meets a bad sample once."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", action="store_true", help="leave the two bad batches out")
args = parser.parse_args()
BAD = [(4, 0), (7, 1)]  # the batch, and the rank that meets it

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
data = torch.randn(192, 8)  # rank 0 has the first half of it
for batch, of in BAD:
    data[96 * of + 8 * batch + 3, 2] = float("nan")
loader = DataLoader(TensorDataset(data), batch_size=8, sampler=range(96 * rank, 96 * rank + 96))
torch.manual_seed(rank)

for i, (inputs,) in enumerate(loader):
    targets = inputs.nan_to_num().sum(1, keepdim=True)
    if args.without and i in dict(BAD):
        continue
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": scheduler.last_epoch}
torch.save({**state, "random": torch.get_rng_state()}, f"{args.out}.{rank}")
dist.destroy_process_group()
