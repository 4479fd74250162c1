"""Scripts for several ranks, one for each way of splitting a model; batch 5 of rank 1 is bad, or was never there.

Each leaves its training state in `state`. `sys.argv[1]` is "bad" or "without".
"""

from __future__ import annotations

import torch

COMMON = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
rank, bad = dist.get_rank(), sys.argv[1] == "bad"

def batches(seed, guilty):
    generator = torch.Generator().manual_seed(seed)
    for i in range(8):
        x, y = torch.randn(4, 8, generator=generator), torch.randint(0, 2, (4,), generator=generator)
        if i == 5 and not bad:
            continue
        if i == 5 and guilty:
            x[1, 2] = float("nan")
        yield x, y

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

def whole(model):
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in model.state_dict().items()}
"""

NESTED = """
class Wrapper(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = nn.parallel.DistributedDataParallel(net(), **options)
    def forward(self, x):
        return self.inner(x)
model = Wrapper(OPTIONS)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
for x, y in batches(rank, rank == 1):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
state = [whole(model), torch.get_rng_state()]
"""

NO_SYNC = """
model = nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in batches(rank, rank == 1):
    with model.no_sync():
        for part in range(rank + 1):  # ranks may have different numbers of micro-batches
            cross_entropy(model(x), y).backward()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
state = whole(model)
"""

JOIN = """
model = nn.parallel.DistributedDataParallel(plain())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for epoch in range(2):
    with model.join():
        for i, (x, y) in enumerate(batches(rank, rank == 1)):
            if rank == 1 and i == 7 - (not bad):
                break  # this rank has one batch fewer
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
state = whole(model)
"""

SYNC_BN = """
class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(h - AllReduce.apply(h.mean(0)) / 2)  # what SyncBatchNorm does: communicates inside the model
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in batches(rank, rank == 1):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
state = whole(model)
"""

BY_HAND = """
model = plain()
model.buffers = []  # a wrapper of somebody's own, as Megatron-Core's, may shadow the method
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in batches(rank, rank == 1):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
del model.buffers
state = whole(model)
"""

PIPELINE = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
torch.manual_seed(0)
parts = [nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
         nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 2)]
interleaved = INTERLEAVED
if interleaved:
    mine = [parts[rank], parts[rank + 2]]
    stages = [PipelineStage(p, rank + 2 * i, 4, torch.device("cpu")) for i, p in enumerate(mine)]
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=cross_entropy)
else:
    mine = [nn.Sequential(*parts[:2]) if rank == 0 else nn.Sequential(*parts[2:])]
    schedule = Schedule1F1B(PipelineStage(mine[0], rank, 2, torch.device("cpu")), n_microbatches=2,
                            loss_fn=cross_entropy)
model = nn.ModuleList(mine)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
turn = [0]
if rank == 1 and bad:  # only the gradient of this stage is bad: nothing carries it to the other one
    next(model[-1].parameters()).register_hook(lambda g: g * float("nan") if turn[0] == 5 else g)
for i, (x, y) in enumerate(batches(1, False)):
    turn[0] = i
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=[])
    optimizer.step()
state = whole(model)
"""

SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
kind = KIND
model = plain()
data = rank
if kind == "hsdp":
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
elif kind == "fsdp-tp":
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    data = mesh["dp"].get_local_rank()
else:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = 1
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in batches(data, data == 1):
    optimizer.zero_grad()
    for half in (slice(0, 2), slice(2, 4)):  # two micro-batches: only the first one is bad
        (cross_entropy(model(x[half]), y[half]) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
state = whole(model)
"""

TWO = {
    "nested DDP": NESTED.replace("OPTIONS", ""),
    "nested DDP, static graph": NESTED.replace("OPTIONS", "static_graph=True"),
    "nested DDP, unused parameters": NESTED.replace("OPTIONS", "find_unused_parameters=True"),
    "DDP, no_sync, uneven micro-batches": NO_SYNC,
    "DDP inside join, uneven batches": JOIN,
    "DDP, collectives inside the model": SYNC_BN,
    "gradients reduced by hand": BY_HAND,
    "pipeline 1F1B": PIPELINE.replace("INTERLEAVED", "False"),
    "pipeline interleaved 1F1B": PIPELINE.replace("INTERLEAVED", "True"),
    "tensor parallel": SHARDED.replace("KIND", "'tp'"),
}
FOUR = {"HSDP 2x2": SHARDED.replace("KIND", "'hsdp'"), "FSDP2 x TP": SHARDED.replace("KIND", "'fsdp-tp'")}
if torch.__version__.startswith("2.7."):  # without any guard its 1F1B waits forever over gloo, and HSDP raises there
    TWO = {name: script for name, script in TWO.items() if "pipeline" not in name}
    FOUR = {name: script for name, script in FOUR.items() if "HSDP" not in name}
