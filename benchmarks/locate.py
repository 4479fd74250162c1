"""What locating costs: one traced replay of a step, over one plain step of the same model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measure import cpu_seconds, interleave, ratio

import nanproof
from guard import FULL, make_batches, make_run

PACKAGES = ("torch",)
FIGURE = 4.0


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    return lambda: cpu_seconds(work)


def report() -> str:
    """The table of the replay, measured interleaved with the plain step."""
    torch.set_num_threads(1)
    model, optimizer = make_run(FULL)
    x, y = make_batches(FULL, 1)[0]

    def plain() -> None:
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def replay() -> None:
        nanproof.locate(lambda: model(x, y), model=model, verify=False)

    def failing() -> None:
        nanproof.locate(lambda: torch.log(model(x, y) * 0), model=model)

    def hooked() -> None:
        found: list[bool] = []
        hooks = [m.register_forward_hook(lambda *a: found.append(bool(a[2].isfinite().all()))) for m in model.modules()]
        plain()
        for hook in hooks:
            hook.remove()
        assert all(found)

    variants = {"plain": timed(plain), "replay": timed(replay), "failing": timed(failing), "hooked": timed(hooked)}
    times = interleave(variants, seconds=40, warmup=1, least=12)
    traced, whole, hooks = (ratio(times, name, "plain") for name in ("replay", "failing", "hooked"))
    return "\n".join(
        [
            "| what | over | median | to reach | |",
            "|---|---|---|---|---|",
            f"| one traced replay, forward and backward | a plain step | {traced.show('{:.2f}')} | ≤ {FIGURE:g} |"
            f" {traced.verdict(FIGURE)} |",
            f"| forward hooks with isfinite, always on | a plain step | {hooks.show('{:.2f}')} | | |",
            f"| a whole location: traced, in float64, verified | a plain step | {whole.show('{:.2f}')} | | |",
        ]
    )
