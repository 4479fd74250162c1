"""Data parallel with checkpoints of its own: one rank is killed in the middle of a step, torchrun starts all again."""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--kill-at", type=int, default=-1)
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
checkpoint, start = Path(f"{args.out}.ckpt"), 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    start = state["batch"]
    if rank == 0:
        print(f"resumed at batch {start}", flush=True)

for i in range(start, 20):
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * rank + i))
    targets = inputs.sum(1, keepdim=True)
    if i in (4, 14) and rank == 1:
        inputs[3, 2] = float("nan")
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    if i == args.kill_at and rank == 1 and first:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    scheduler.step()
    if rank == 0 and (i + 1) % 5 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**state, "batch": i + 1}, f"{checkpoint}.new")
        Path(f"{checkpoint}.new").replace(checkpoint)

if rank == 0:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": scheduler.last_epoch}
    torch.save(state, args.out)
dist.destroy_process_group()
