"""`locate`: play the step again, find the first bad operation, say why, and prove it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .blame import blame, passes_meant, relevant_parents
from .location import Location, Phase, code_frame
from .mechanism import mechanism_of
from .patch import Patch
from .precision import in_precision
from .replay import Scene, batch_tensors, bind, play_step, run_step
from .trace import Event, Trace, key_of, kind_of


def locate(
    step_fn: Callable[..., Any],
    *,
    model: nn.Module,
    batch: Any = None,
    max_bytes: int = 256 << 20,
    verify: bool = True,
    lockstep: bool = False,
) -> Location:
    """Find the operation that makes a step's loss or gradients non-finite.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> location = locate(lambda: torch.log(model(torch.zeros(1, 2)) * 0).sum(), model=model)
    >>> location.mechanism, location.op, location.verified
    ('pole', 'log', True)

    ``step_fn()`` or ``step_fn(model, batch)`` returns the loss; it must not call backward. Model, gradients,
    random states and batch are left as they were. ``max_bytes`` caps the evidence that is kept. ``lockstep``
    plays forward and backward exactly once whatever is found, so that ranks can do it together.
    """
    step = bind(step_fn, model, batch)
    scene = Scene(model, batch)
    with scene.kept(), torch.compiler.set_stance("force_eager"):
        trace, loss, sinks = _play(step, scene, batch, max_bytes, lockstep)
        scene.complain()
        if not sinks:
            return Location(reproduced=False, notes=_what_differs(loss))
        found = blame(trace.events, sinks)
        if not found.origins:
            return Location(
                reproduced=True, notes=("a bad value came from outside the step and could not be followed",)
            )
        places = [_place(trace.events, o) for o in found.origins]
        primary = dataclasses.replace(
            places[0], chain=_way(found.chain, loss), also=tuple(places[1:5]), component=trace.component
        )
        if lockstep:
            return primary
        if primary.mechanism in ("pole", "invalid") and primary.phase != "leaf" and _good_in_float64(step, scene):
            why = f"{primary.why}; the whole step is finite in float64: a value was lost before"
            primary = dataclasses.replace(primary, mechanism="underflow", why=why)
        if verify:
            healed, patch = _verified(step, scene, batch, found.origins)
            more = () if healed else _behind(step, scene, batch, max_bytes, found.origins[0], patch)
            known = {(p.file, p.line) for p in (primary, *primary.also)}
            fresh = tuple(m for m in more if (m.file, m.line) not in known)
            primary = dataclasses.replace(primary, verified=healed, also=(*primary.also, *fresh)[:6])
        return primary


def _behind(
    step: Callable[[], Any], scene: Scene, batch: Any, max_bytes: int, first: Event, patch: Patch | None
) -> list[Location]:
    """Origins that show only when the first one is out of the way."""

    def look() -> list[Location]:
        trace, _, sinks = _play(step, scene, batch, max_bytes, False, patch)
        return [_place(trace.events, o) for o in blame(trace.events, sinks).origins]

    if first.phase == "leaf":
        return scene.healed(first.leaf, batch, look)
    return look() if patch is not None else []


def _play(
    step: Callable[[], Any], scene: Scene, batch: Any, max_bytes: int, lockstep: bool, patch: Patch | None = None
) -> tuple[Trace, Tensor, list[int]]:
    """One traced pass; the events that the bad loss or gradients came from."""
    scene.reset()
    trace = Trace(scene.model, _leaves(scene.model, batch), max_bytes=max_bytes, patch=patch)
    with trace:
        played = play_step(step)
    loss = played.loss
    trace.component = next((name for name, term in played.terms.items() if kind_of(term)), "")
    bad_loss = [trace.producer[key_of(loss)]] if kind_of(loss) and key_of(loss) in trace.producer else []
    if kind_of(loss) and not lockstep:
        return trace, loss, bad_loss
    if loss.grad_fn is not None:
        trace.graph.learn(loss.grad_fn)
        with trace:
            loss.backward()  # type: ignore[no-untyped-call]
    if bad_loss:
        return trace, loss, bad_loss
    if trace.sinks:  # several ranks: what this rank itself sent into a reduction
        return trace, loss, trace.sinks
    if lockstep:
        return trace, loss, []  # bad gradients without a bad value of this rank's own came from another rank
    bad = [p.grad for p in scene.model.parameters() if p.grad is not None and kind_of(p.grad)]
    bad += [t.grad for _, t in batch_tensors(batch) if t.grad is not None and kind_of(t.grad)]
    return trace, loss, sorted({trace.producer[key_of(g)] for g in bad if key_of(g) in trace.producer})


def _leaves(model: nn.Module, batch: Any) -> list[tuple[str, Tensor]]:
    named = [(f"parameter {n}", p.detach()) for n, p in model.named_parameters()]
    named += [(f"buffer {n}", b) for n, b in model.named_buffers() if b.is_floating_point()]
    return named + [(n, t) for n, t in batch_tensors(batch) if t.is_floating_point() or t.is_complex()]


def _place(events: list[Event], event: Event) -> Location:
    file, line, function = event.frames[0] if event.frames else ("", 0, "")
    meant = any(passes_meant(events, p) for p in relevant_parents(events, event))
    mechanism, why = mechanism_of(event, meant)
    phase: Phase = event.phase  # type: ignore[assignment]
    if event.phase == "forward" and event.parents and all(p == -1 for _, p in event.parents) and not meant:
        phase, mechanism = "outside", "outside-dispatcher"
        why = f"an input of {event.op} was bad already, and no torch operation made it so"
    leaf = event.leaf
    if leaf and event.output is not None and event.output.first_bad is not None:
        leaf = f"{leaf}{list(event.output.first_bad)}"
    return Location(
        reproduced=True, phase=phase, op=event.op, file=file, line=line, function=function,
        code=tuple(code_frame(file, line)), module=event.module,
        mechanism=mechanism, why=why, inputs=tuple(event.inputs), outputs=(event.output,) if event.output else (),
        leaf=leaf,
    )  # fmt: skip


def _way(chain: list[Event], loss: Tensor) -> tuple[str, ...]:
    names = [e.op or e.leaf for e in chain]
    short = [n for i, n in enumerate(names) if i == 0 or n != names[i - 1]]
    return (*short, "loss" if kind_of(loss) else "gradient")


def _verified(
    step: Callable[[], Any], scene: Scene, batch: Any, origins: list[Event]
) -> tuple[bool | None, Patch | None]:
    """Whether the step is finite when only the first origin is neutralised, and how; None when it cannot be.

    What a good value would have been is not known, so several are tried: zero, one, a large one; first in this
    operation alone, then wherever its line runs (a loop, a module used twice).
    """
    first = origins[0]
    if first.phase == "leaf":
        return scene.healed(first.leaf, batch, lambda: _finite(step, scene, None)), None
    if first.call < 0:
        return None, None
    frame = tuple(first.frames[:1])
    for whole_line, fill in ((False, 0.0), (False, 1.0), (True, 0.0), (True, 1.0), (True, 1e30)):
        patch = Patch(call=first.call, seq=first.seq, op=first.op, frame=frame, whole_line=whole_line, fill=fill)
        if _finite(step, scene, patch):
            return True, patch
    return False, Patch(call=first.call, seq=first.seq, op=first.op, frame=frame, whole_line=True, fill=1.0)


def _finite(step: Callable[[], Any], scene: Scene, patch: Patch | None) -> bool:
    """Whether the step, with a patch, gives a finite loss and finite gradients."""
    scene.reset()
    with Trace(scene.model, [], patch=patch):
        loss = run_step(step)
        if loss.grad_fn is not None:
            loss.backward()  # type: ignore[no-untyped-call]
    return not kind_of(loss) and not any(kind_of(p.grad) for p in scene.model.parameters() if p.grad is not None)


def _good_in_float64(step: Callable[[], Any], scene: Scene) -> bool:
    scene.reset()
    try:
        with in_precision(scene.model, torch.float64) as mode:
            loss = run_step(step)
            if loss.grad_fn is not None:
                loss.backward()  # type: ignore[no-untyped-call]
            return not kind_of(loss) and not any(map(kind_of, mode.gradients()))
    except Exception:
        return False  # code that insists on its dtype gives no answer


def _what_differs(loss: Tensor) -> tuple[str, ...]:
    return (
        f"loss {float(loss.detach()):.6g}, all gradients finite",
        "if it failed before: the batch, the random states, the weights, the device or the versions differ now,",
        "or only compiled code fails (the replay runs eagerly)",
    )
