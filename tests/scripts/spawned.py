"""Data parallel over processes that the script spawns itself, as older tutorials do."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(rank)
    for i in range(8):
        inputs = torch.randn(8, 8, generator=data)
        targets = inputs.sum(1, keepdim=True)
        if i == 5 and rank == 1:
            inputs[3, 2] = float("nan")
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    path = str(Path(parser.parse_args().out).absolute())
    mp.spawn(train, (path,), nprocs=2)
