"""What one float32 island costs in a model of twelve blocks under autocast: time, and memory kept for backward."""

from __future__ import annotations

import dataclasses

import torch
from measure import cpu_seconds, interleave, ratio, verdict

import nanproof
from guard import FULL, make_batches, make_run

PACKAGES = ("torch",)
TIME, MEMORY = 1.10, 1.10


def report() -> str:
    """The table, measured interleaved: the same step without and with the island."""
    torch.set_num_threads(1)
    size = dataclasses.replace(FULL, layers=12)
    model, optimizer = make_run(size)
    x, y = make_batches(size, 1)[0]
    block = "blocks.5"

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def healed() -> float:
        nanproof.islands.open(model, block)
        try:
            return cpu_seconds(step)
        finally:
            nanproof.islands.close(model)

    times = interleave({"plain": lambda: cpu_seconds(step), "healed": healed}, seconds=30, warmup=2, least=12)
    found = ratio(times, "healed", "plain")
    without = kept(step)
    nanproof.islands.open(model, block)
    memory = kept(step) / without
    nanproof.islands.close(model)
    return "\n".join(
        [
            "| one island in twelve blocks, autocast to bfloat16 | over | median | to reach | |",
            "|---|---|---|---|---|",
            f"| a step, float32 weights | without it | {found.show('{:.2f}')} | ≤ {TIME:.2f} | {found.verdict(TIME)} |",
            f"| bytes kept for the backward pass | without it | {memory:.3f} | ≤ {MEMORY:.2f} |"
            f" {verdict(memory <= MEMORY)} |",
        ]
    )


def kept(step: object) -> int:
    """Bytes that autograd keeps of one step, each memory counted once."""
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        alive.append(memory)  # so that no address is used twice
        seen[memory.data_ptr()] = memory.nbytes()
        return tensor

    assert callable(step)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(seen.values())
