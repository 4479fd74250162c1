"""The batch that an incident names is the one that was trained on."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from run.launch import guarded

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0)
x = torch.randn(96, 8)
y = x.sum(1, keepdim=True)
bad = x.clone()
bad[37, 2] = float("nan")
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
def step(*losses):
    optimizer.zero_grad()
    sum(losses).backward()
    optimizer.step()
def loss(a, b):
    return nn.functional.mse_loss(model(a), b)
"""

LOOPS = {
    "one batch ahead, copied, with a constant mask": (
        """
        class Masked(Dataset):
            def __len__(self):
                return 96
            def __getitem__(self, i):
                return {"x": bad[i], "mask": torch.ones(8), "y": y[i]}
        def ahead(loader):
            it = iter(loader)
            now = next(it)
            for following in it:
                yield {k: v.clone() for k, v in now.items()}
                now = following
            yield now
        for batch in ahead(DataLoader(Masked(), batch_size=8)):
            step(loss(batch["x"] * batch["mask"], batch["y"]))
        """,
        "DataLoader batch 4 (dataset indices 32–39)",
    ),
    "two loaders in one step": (
        """
        labeled, unlabeled = TensorDataset(x, y), TensorDataset(bad)
        for (a, b), (u,) in zip(DataLoader(labeled, batch_size=8), DataLoader(unlabeled, batch_size=4)):
            step(loss(a, b), model(u).square().mean())
        """,
        "DataLoader batch 9 (dataset indices 36–39)",
    ),
    "views of one tensor": (
        """
        class Views(Dataset):
            def __len__(self):
                return 12
            def __getitem__(self, i):
                return bad[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]
        for a, b in DataLoader(Views(), batch_size=None):
            step(loss(a, b))
        """,
        "DataLoader batch 4",
    ),
    "the same two batches in every epoch, copied": (
        """
        for epoch in range(2):
            for a, b in DataLoader(TensorDataset(bad[24:40], y[24:40]), batch_size=8):
                step(loss(a.clone(), b))
        """,
        "DataLoader batch 1 (dataset indices 8–15)",
    ),
    "values that the script makes beside the batch": (
        """
        for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
            made = torch.log(torch.zeros(8, 8) - float(i == 4))
            step(loss(a, b), model(made.where(made.isnan(), 0)).square().mean())
        """,
        "DataLoader batch 4 (dataset indices 32–39), finite as delivered: the script made the bad values",
    ),
    "copies of batches that cannot be told apart": (
        """
        a = DataLoader(TensorDataset(torch.ones(16, 8), torch.arange(16.0)), batch_size=8)
        for i, (ones, other) in enumerate([*a, *a]):
            step(model(ones.clone()).square().mean() * (float("nan") if i == 3 else 1))
        """,
        "ambiguous between DataLoader batch 0 (dataset indices 0–7) and DataLoader batch 1 (dataset indices 8–15)",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_batch_that_is_named(name: str, tmp_path: Path) -> None:
    loop, named = LOOPS[name]
    ran = guarded(tmp_path, HEAD + textwrap.dedent(loop))
    assert ran.outcome.exit_code == 0
    assert [named in i["notes"] for i in ran.incidents] == [True] * len(ran.incidents)
    assert ran.incidents
