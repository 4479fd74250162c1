"""The classic ladder, for --conservative and --escalate: steps that often help and that no evidence asked for.

0  lr / 2, warm-up x 2, clipping at 1.0, accumulation x 2, checkpoints twice as often
1  lr x 0.3, accumulation x 4
2  lr x 0.1, accumulation x 8
3  the same, and scan the data
4  fp32, the last resort
5  resume from a checkpoint from before the failure
"""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case
from .proposals import Answer, Proposal, Refusal, nice, propose, whole
from .remedies import scaled_minimum, set_precision

TOP = 5
_RATE = (0.5, 0.3, 0.1)
_ACCUMULATION = (2, 4, 8)


def climb(case: Case, level: int) -> Iterator[Answer]:
    """The changes of one level; each says how far up it stands."""
    rung = "--conservative" if level == 0 else f"--escalate {level}"
    step = min(level, 2)
    yield from _rate(case, _RATE[step], rung)
    yield from _warmup(case, rung)
    yield from _clip(case, rung)
    yield from _accumulate(case, _ACCUMULATION[step], rung)
    yield from _save(case, rung)
    if level >= 4:
        yield from set_precision(case, "fp32", f"{rung}: the last resort against a lack of range", [])
    if level >= 5:
        yield from _resume(case, rung)


def advice(case: Case, level: int) -> Iterator[str]:
    """What a level asks for that is no setting."""
    if level >= 3:
        yield "scan the data for NaN and Inf: nanproof diagnose --data DIR"
    if level >= 5 and not case.facts.says("last_healthy"):
        yield "find the last healthy checkpoint: nanproof scan RUN"


def _rate(case: Case, factor: float, rung: str) -> Iterator[Answer]:
    lr = case.number("lr")
    if lr is None or lr <= 0:
        yield Refusal(what="lr", why="no learning rate is written here")
        return
    yield propose(case, "lr", nice(lr * factor), f"{rung}: {factor:g} times the rate")
    yield from scaled_minimum(case, lr, lr * factor)


def _warmup(case: Case, rung: str) -> Iterator[Answer]:
    steps, ratio, total = case.number("warmup_steps"), case.meaning.number("warmup_ratio"), case.number("max_steps")
    held = case.value("warmup_ratio")
    if steps and steps >= 1:
        yield propose(case, "warmup_steps", whole(steps * 2), f"{rung}: twice the warm-up")
    elif held is not None and ratio:
        yield Proposal(key=held.key, after=nice(min(0.3, ratio * 2)), why=f"{rung}: twice the warm-up")
    elif case.key("warmup_steps") is not None:
        after = whole(min(2000, 0.05 * total)) if total and total > 0 else 2000
        yield propose(case, "warmup_steps", after, f"{rung}: there is no warm-up yet")
    else:
        yield Refusal(what="warm-up", why="this config has no key for it")


def _clip(case: Case, rung: str) -> Iterator[Answer]:
    norm = case.number("clip_norm")
    if norm is None or norm == 0 or norm > 1:
        yield propose(case, "clip_norm", 1.0, f"{rung}: clip the gradient norm at 1.0")
        return
    why = f"already {norm:g}"
    if case.adam:
        why += "; a lower limit scales all gradients alike, and Adam divides the scale out again"
    held = case.value("clip_norm")
    yield Refusal(what=held.label if held else "clip_norm", why=why, mark="low value")


def _accumulate(case: Case, factor: int, rung: str) -> Iterator[Answer]:
    steps = case.number("accumulation")
    if steps is None or steps < 1:
        yield Refusal(what="accumulation", why="this config has no key for it, and no reader is known that takes one")
        return
    yield propose(case, "accumulation", whole(steps * factor), f"{rung}: average gradients over more batches")


def _save(case: Case, rung: str) -> Iterator[Answer]:
    every, held = case.number("save_every"), case.value("save_every")
    if every is not None and every > 1:
        yield propose(case, "save_every", whole(every / 2), f"{rung}: lose less when it fails again")
    elif held is None:
        yield Refusal(what="checkpoints", why="this config does not say how often they are written")


def _resume(case: Case, rung: str) -> Iterator[Answer]:
    name, held = case.facts.says("last_healthy"), case.value("resume_from")
    if name and held is not None:
        yield Proposal(
            key=held.key,
            after=name,
            why=f"{rung}: resume from before the failure",
            evidence=(case.facts.tell("last_healthy"),),
        )
