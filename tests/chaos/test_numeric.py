"""Random faults in random runs: whatever is drawn, the guarded run ends in the state of the clean one.

``make chaos SEEDS=200`` runs a longer campaign; a failing seed is run again with ``make chaos SEED=17``.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import nn

from nanproof import Guard, Policy
from support.runs import FAULTS, Batch, Net, digest, loss_of, make_batches, seed_everything

N = 24
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
}


def seeds() -> list[int]:
    one = os.environ.get("CHAOS_SEED")
    return [int(one)] if one else list(range(int(os.environ.get("CHAOS_SEEDS", "16"))))


def draw(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    amp = rng.choice([None, "fp16", "bf16"])
    kinds = [f"{site}{kind}" for site in ("", "grad:") for kind in FAULTS]
    if amp == "fp16":  # a finite spike in scaled float16 gradients is an overflow, which is GradScaler's business
        kinds = [k for k in kinds if "spike" not in k]
    positions = rng.sample(range(10, N), rng.randint(1, 3))
    return {
        "optimizer": rng.choice(list(OPTIMIZERS)), "amp": amp, "closure": amp == "fp16" or rng.random() < 0.7,
        "max_norm": rng.choice([None, 0.1, 1.0, 100.0]), "faults": {p: rng.choice(kinds) for p in positions},
        "snapshot_every": rng.choice([None, 3, 7]), "rerun": rng.random() < 0.5, "seed": seed,
    }  # fmt: skip


def train(trial: dict[str, Any], *, faulty: bool, guarded: bool = True) -> str:
    seed_everything(trial["seed"])
    model = Net()
    optimizer = OPTIMIZERS[trial["optimizer"]](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if trial["amp"] == "fp16" else None
    policy = Policy(rerun=trial["rerun"] or scaler is not None) if guarded else Policy.observe(spikes="observe")
    guard = Guard(
        model, optimizer, scheduler=scheduler, scaler=scaler, max_norm=trial["max_norm"], policy=policy, window=16,
        snapshot_every=trial["snapshot_every"],
    )  # fmt: skip
    for i, batch in enumerate(make_batches(N, seed=trial["seed"])):
        bad = Batch(batch.x.flip(0), batch.y, trial["faults"][i]) if faulty and i in trial["faults"] else None
        for b in [bad, batch] if bad else [batch]:
            if trial["closure"]:
                guard.step(lambda b=b: forward(model, b, trial["amp"]))
            else:
                guard.backward(forward(model, b, trial["amp"]))
                guard.step()
    guard.close()
    return digest(model, [optimizer], scheduler, scaler)


def forward(model: nn.Module, batch: Batch, amp: str | None) -> torch.Tensor:
    if amp is None:
        return loss_of(model, batch)
    with torch.autocast("cpu", torch.float16 if amp == "fp16" else torch.bfloat16):
        return loss_of(model, batch)


@pytest.mark.parametrize("seed", seeds())
def test_whatever_goes_wrong_the_bad_batches_never_happened(seed: int) -> None:
    trial = draw(seed)
    clean = train(trial, faulty=False)
    assert train(trial, faulty=True, guarded=False) != clean, f"void trial, the fault does no harm: {trial}"
    assert train(trial, faulty=True) == clean, f"reproduce with: make chaos SEED={seed}   {trial}"
