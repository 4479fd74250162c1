"""A long run: `make soak` trains a small model for 100,000 guarded steps with rare random faults.

The same model trains beside it in a plain loop that never sees a bad batch. At the end the two must be in the same
state, each fault must have had its verdict and nothing else one, and memory must be where it was. `--steps 5000` is a
short trial, which writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from written import write_table

from nanproof import Guard
from nanproof.files import read_jsonl
from support.runs import Batch, Net, digest, loss_of, seed_everything

RATE = 1 / 400
KINDS = ("nan", "+inf", "-inf", "spike", "grad:nan", "grad:+inf", "grad:-inf", "grad:spike")
WARM = 1000
"""No fault before: the guard first learns what is normal."""
LONG = 100_000
"""Steps from which on the table is written, and memory is judged in megabytes, too."""
OBJECTS = 1000
"""Live Python objects that may be more at the end; one that each step leaves behind would be 1,350 in a short trial."""
MEGABYTES = 8.0
"""What memory may differ by in a long run; in a short trial the allocator alone moves as much."""


def batch_of(step: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=g)
    return Batch(x, (x[:, :4] + torch.randn(16, 4, generator=g)).argmax(1))  # noisy, so that the loss stays alive


def faults_of(steps: int, seed: int) -> dict[int, str]:
    dice = random.Random(seed)
    return {s: dice.choice(KINDS) for s in range(WARM, steps) if dice.random() < RATE}


def held_now() -> tuple[int, float]:
    """Live Python objects, and the megabytes of memory that this process holds."""
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return len(gc.get_objects()), int(line.split()[1]) / 1024


def make() -> tuple[nn.Module, Any, Any]:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000, eta_min=1e-3)


def train_plainly(steps: int) -> str:
    model, optimizer, scheduler = make()
    for step in range(steps):
        loss_of(model, batch_of(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return digest(model, [optimizer], scheduler)


def load_what_incidents_need() -> None:
    """Guard a bad step of each kind: the first of a process loads the code that examines it, which is no leak."""
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, scheduler = make()
        guard = Guard(model, optimizer, scheduler=scheduler, max_norm=1.0, run_dir=folder)
        for step in range(400):
            fault = KINDS[step // 10 % len(KINDS)] if step >= 200 and step % 10 == 0 else None
            batch = dataclasses.replace(batch_of(step), fault=fault)
            guard.step(lambda b=batch: loss_of(model, b), batch=batch)
        guard.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="A long guarded run with rare faults; writes docs/reliability.md.")
    parser.add_argument("--steps", type=int, default=LONG)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    faults = faults_of(options.steps, options.seed)
    missed, alarms, held = [], [], []
    start = time.monotonic()
    load_what_incidents_need()
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, scheduler = make()
        guard = Guard(model, optimizer, scheduler=scheduler, max_norm=1.0, run_dir=folder)
        for step in range(options.steps):
            if step in faults:
                clean = batch_of(-step)
                bad = Batch(clean.x, clean.y, faults[step])
                if guard.step(lambda b=bad: loss_of(model, b), batch=bad).ok:
                    missed.append(step)
            batch = batch_of(step)
            verdict = guard.step(lambda b=batch: loss_of(model, b), batch=batch)
            if not verdict.ok:
                alarms.append(f"step {step}: {verdict}")
            if (step + 1) % (options.steps // 10) == 0:
                held.append(held_now())
                objects, megabytes = held[-1]
                seconds = time.monotonic() - start
                print(f"{step + 1:,} steps, {objects:,} objects, {megabytes:.0f} MB, {seconds:.0f} s", flush=True)
        guard.close()
        state = digest(model, [optimizer], scheduler)
        lines = sum(1 for r in read_jsonl(Path(folder) / "training_log.jsonl") if "loss" in r)
    equal = state == train_plainly(options.steps)
    taken = options.steps + len(faults)
    objects, megabytes = (last - first for first, last in zip(held[0], held[-1], strict=True))
    long = options.steps >= LONG
    rows = [
        ("guarded steps", f"{taken:,}", lines == taken, "each in the log"),
        ("faults", f"{len(faults):,}", not missed, f"{len(missed)} missed"),
        ("false alarms", f"{len(alarms):,}", not alarms, "0"),
        ("final state", "equal" if equal else "different", equal, "equal to the plain run's"),
        ("live objects, from a tenth of the run to its end", f"{objects:+,}", objects <= OBJECTS, f"+{OBJECTS:,}"),
    ]
    if long:
        within = abs(megabytes) <= MEGABYTES
        rows.append(
            ("memory, from a tenth of the run to its end", f"{megabytes:+.1f} MB", within, f"± {MEGABYTES:g} MB")
        )
    text = "\n".join(
        ["| what | measured | to reach | |", "|---|---|---|---|"]
        + [
            f"| {what} | {got} | {goal} | {'reached' if good else '**not reached**'} |"
            for what, got, good, goal in rows
        ]
    )
    print(f"\n{text}\n\n{time.monotonic() - start:.0f} s")
    for wrong in [*(f"missed at {m}: {faults[m]}" for m in missed), *alarms][:20]:
        print(wrong)
    if long:
        write_table("reliability.md", "soak", text, ("torch",))
    return int(not all(good for _, _, good, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
