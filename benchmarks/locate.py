"""What locating costs over one plain step of the same model: time with proof, and peak memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import torch
from measure import cpu_seconds, interleave, ratio

import nanproof
from guard import FULL, make_batches, make_run

PACKAGES = ("torch",)
FORWARD, BACKWARD, MEMORY = 4.0, 6.0, 1.5


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    return lambda: cpu_seconds(work)


def report() -> str:
    """The table of whole locations, measured interleaved with the plain step."""
    torch.set_num_threads(1)
    model, optimizer = make_run(FULL)
    x, y = make_batches(FULL, 1)[0]

    def plain() -> None:
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def forward() -> None:
        assert nanproof.locate(lambda: torch.log(model(x, y) * 0), model=model).verified

    def slope(loss: torch.Tensor) -> torch.Tensor:
        return loss + torch.sqrt(loss - loss.detach())

    def backward() -> None:
        assert nanproof.locate(lambda: slope(model(x, y)), model=model).verified

    def deep() -> None:
        """The same slope at the other end of the backward pass: everything before it is replayed."""
        first = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
        hook = first.register_forward_hook(lambda *a: a[2] + torch.sqrt((a[2] - a[2].detach()).sum()))
        assert nanproof.locate(lambda: model(x, y), model=model).verified
        hook.remove()

    def overflow() -> None:
        """A gradient that leaves float32 there: no pole tells that rounding is not to blame, the whole pass does."""
        first = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
        hook = first.register_forward_hook(lambda *a: a[2] + (a[2] - a[2].detach()) * 1e37 * 1e37)
        assert nanproof.locate(lambda: model(x, y), model=model).verified
        hook.remove()

    def hooked() -> None:
        found: list[bool] = []
        hooks = [m.register_forward_hook(lambda *a: found.append(bool(a[2].isfinite().all()))) for m in model.modules()]
        plain()
        for hook in hooks:
            hook.remove()
        assert all(found)

    for _ in range(3):
        plain()
    before = peak_mb()
    forward()
    backward()
    deep()
    overflow()
    memory = peak_mb() / before
    work = {
        "plain": plain,
        "forward": forward,
        "backward": backward,
        "deep": deep,
        "overflow": overflow,
        "hooked": hooked,
    }
    variants = {name: timed(each) for name, each in work.items()}
    times = interleave(variants, seconds=50, warmup=1, least=12)
    fore, back, first, over, hooks = (ratio(times, name, "plain") for name in list(work)[1:])
    fits = "reached" if memory <= MEMORY else "not reached"
    return "\n".join(
        [
            "| what | over | median | to reach | |",
            "|---|---|---|---|---|",
            f"| a forward fault: located, in float64, proved | a plain step | {fore.show('{:.2f}')} | ≤ {FORWARD:g} |"
            f" {fore.verdict(FORWARD)} |",
            f"| a backward fault: located, in float64, proved | a plain step | {back.show('{:.2f}')} | ≤ {BACKWARD:g} |"
            f" {back.verdict(BACKWARD)} |",
            f"| a backward fault in the first layer | a plain step | {first.show('{:.2f}')} | ≤ {BACKWARD:g} |"
            f" {first.verdict(BACKWARD)} |",
            f"| an overflow in the gradient of the first layer | a plain step | {over.show('{:.2f}')} |"
            f" ≤ {BACKWARD:g} | {over.verdict(BACKWARD)} |",
            f"| peak memory of the process | training alone | {memory:.2f} | ≤ {MEMORY:g} | {fits} |",
            f"| forward hooks with isfinite, always on | a plain step | {hooks.show('{:.2f}')} | | |",
        ]
    )


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
