"""`locate`: replay the step, find the first bad operation, say why, and prove it."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..location import Location, Phase, call_name, code_frame
from ..losses import Losses
from .apart import apart
from .blame import Blame, Blamer, relevant_parents
from .bounds import Endless, most_operations
from .collectives import CollectiveRefused, has_peers, no_collectives
from .differently import other_kernels
from .exactly import Failure, Reached
from .mechanism import forward_op, mechanism_of, vanished_eps
from .mode import ReplayMode
from .modules import by_modules
from .patch import Neutralize, Patch, Shift
from .precision import InFloat64, in_float64, where_rounded
from .replay import Replay, bind
from .rounding import Rounding
from .sandbox import OutOfTime, Sandbox
from .suspect import suspect_commit
from .trace import Event, Trace
from .update import writer_of
from .values import (
    NAN,
    frames_of,
    key_of,
    kind_of,
    library_frames,
    own_frame,
)


def locate(
    step_fn: Callable[..., Any],
    *,
    model: nn.Module,
    batch: Any = None,
    max_bytes: int = 256 << 20,
    verify: bool = True,
    lockstep: bool = False,
    loss_weights: Mapping[str, float] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: float | None = None,
    seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Location:
    """Find the operation that makes a step's loss or gradients non-finite.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> location = locate(lambda: torch.log(model(torch.zeros(1, 2)) * 0).sum(), model=model)
    >>> location.mechanism, location.op, location.verified
    ('pole', 'log', True)

    ``step_fn()`` or ``step_fn(model, batch)`` returns the loss, or runs backward itself. Everything is left as it
    was: the model and other modules that the step uses, gradients, random states, the batch.

    ``max_bytes`` caps the evidence that is kept. ``lockstep`` says that all ranks replay together, forward and
    backward exactly once; without it a replay refuses to communicate. ``loss_weights`` are the weights of named
    losses, ``optimizer`` explains a bad parameter, and ``loss`` is what the original step gave: a replay that
    gives another is told as such. After ``seconds`` no further replay is begun. ``progress`` is called with what
    is being done.
    """
    step = bind(step_fn, model, batch)

    def search() -> Location:
        sandbox = Sandbox(model, batch, step_fn, seconds)  # inside: it must not put back what the replay needs
        one = _Search(step, sandbox, max_bytes, loss_weights, optimizer, loss, progress)
        with sandbox.kept():
            return one.together() if lockstep else one.run(verify)

    alone = no_collectives(model) if not lockstep else nullcontext()
    try:
        with alone, _eager(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step has given its warnings already
            return _without_compiling(search, once=lockstep)
    except CollectiveRefused as refused:
        said = f"not located on several ranks: {refused.message}"
        return Location(reproduced=False, mechanism="communication", notes=(said,))


def _eager() -> AbstractContextManager[Any]:
    """Compiled code runs eagerly; importing the compiler for that would take longer than the replay."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _without_compiling(search: Callable[[], Location], *, once: bool) -> Location:
    """Search again, eagerly, when it is the step that imports the compiler (torch.cond): it has compiled our modes."""
    if once or "torch._dynamo" in sys.modules:
        return search()
    try:
        found = search()
    except UsageError:
        if "torch._dynamo" not in sys.modules:
            raise
    else:
        if "torch._dynamo" not in sys.modules:
            return found
    with _eager():
        return search()


class _Search:
    """One call of `locate`."""

    def __init__(
        self,
        step: Callable[[], Any],
        sandbox: Sandbox,
        max_bytes: int,
        weights: Mapping[str, float] | None,
        optimizer: torch.optim.Optimizer | None,
        expected: float | None,
        progress: Callable[[str], None] | None,
    ) -> None:
        self._progress, self._process = progress, os.getpid()
        self.step, self.sandbox = step, sandbox
        self._max_bytes, self._weights = max_bytes, weights
        self._optimizer, self._expected = optimizer, expected
        self._differentiates = False
        self._trace: Trace | None = None
        self._most = math.inf
        """Operations that a replay on other values may run."""
        self._endless = False
        """Whether one ran more."""
        self._wide = InFloat64()
        self._left: list[str] = []
        """Operations before the origin that the proof could not compute in float64."""
        self._elsewhere: list[str] = []
        """Threads of the step in which nothing could be looked at."""
        self._raised = ""
        """What the step itself raises, when a bad value ends it before there is a loss."""

    def _say(self, what: str) -> None:
        if self._progress is not None and os.getpid() == self._process:  # a child has no display
            self._progress(what)

    def together(self) -> Location:
        """All ranks replay at once: exactly one forward and one backward."""
        trace, losses, sinks = self._traced(lockstep=True)
        return self._told(trace, losses, sinks) if sinks else self._nothing(losses)

    def run(self, verify: bool) -> Location:
        try:
            trace, losses, sinks = self._traced()
        except UsageError as error:
            if not self._raises():
                return self._by_modules(f"under a trace {error.message}")
            trace, losses, sinks = self._before_error(error)
        self.sandbox.complain()
        self.sandbox.reproduced()
        self._most = most_operations(trace.count)
        if not sinks:
            return self._not_reproduced(losses)
        found = self._told(trace, losses, sinks)
        if self._elsewhere:
            return self._beside_threads(found)
        if not found.line and not found.leaf:
            return found
        primary = self._blame.origins[0]
        try:
            found, primary = self._before_zero(trace, self._if_left_out(found, primary), primary)
            found = self._widened(found, primary)
            if not verify:
                return found
            proved, remark = apart(lambda: self._proved(found, primary), found, "proved")
            return dataclasses.replace(proved, doubt=remark.partition(": ")[2]) if remark else proved
        except CollectiveRefused:
            raise
        except OutOfTime as error:
            return dataclasses.replace(found, doubt=str(error))
        except Exception as error:  # the answer stands; only its proof could not be had
            return dataclasses.replace(found, doubt=f"replaying it again failed ({type(error).__name__}: {error})")

    def _raises(self) -> bool:
        """Whether the step raises by itself too, and not only while every operation is looked at."""
        self.sandbox.reset()
        try:
            Replay(self.step, self.sandbox, self._weights).forward()
        except UsageError:
            return True
        return False

    def _before_error(self, error: UsageError) -> tuple[Trace, Losses, list[int]]:
        """A step that raises because of a bad value (multinomial, a check of arguments): the last one that it made."""
        trace = self._trace
        blamer = Blamer(trace.events) if trace is not None else None
        bad = [e.number for e in (trace.events if trace else ()) if blamer and not blamer.is_intentional(e.number)]
        if trace is None or not bad:
            raise error
        self._raised = error.message.partition("\n")[0]
        return trace, Losses(total=torch.tensor(math.nan), components={}), bad[-1:]

    def _beside_threads(self, found: Location) -> Location:
        """A step that computes in other threads too: only what it does in this one was looked at."""
        said = f"the step also computes in other threads ({', '.join(self._elsewhere[:4])})"
        if found.phase == "leaf" or (found.phase == "forward" and found.line):  # of good inputs, seen in this thread
            return dataclasses.replace(found, doubt=f"{said}, whose operations are not seen")
        return self._by_modules(f"{said}, whose operations are not seen")

    def _by_modules(self, reason: str) -> Location:
        # beside threads a bad gradient was seen
        return by_modules(self.step, self.sandbox, self._weights, reason, failed=bool(self._elsewhere))

    def _traced(self, lockstep: bool = False, fill_empty: bool = False) -> tuple[Trace, Losses, list[int]]:
        """One traced pass; the events that the bad loss or gradients came from."""
        self._say("replaying the step, looking at every operation")
        self.sandbox.reset()
        trace = Trace(
            self.sandbox.modules(),
            self.sandbox.leaves(),
            max_bytes=self._max_bytes,
            fill_empty=fill_empty,
            most=self._most,
        )
        self._trace = trace
        replay = Replay(self.step, self.sandbox, self._weights)
        replay.learn = trace.graph.learn
        with trace, replay.hearing_threads():
            losses = replay.forward()
        self._differentiates = replay.differentiates
        loss = losses.total
        bad_loss = kind_of(loss) > 0
        if not bad_loss or lockstep:
            with trace:
                replay.backward(losses)
        self._elsewhere = sorted(replay.elsewhere)
        if bad_loss:
            return trace, losses, self._producers(trace, [(loss, loss)])
        if trace.sinks or (lockstep and self.sandbox.sharded):  # what this rank itself sent into a reduction
            return trace, losses, trace.sinks
        bad = [(leaf, g) for leaf, g in replay.gradients() if kind_of(g)]
        bad += [(t, t.grad) for _, t in self.sandbox.tensors if t.grad is not None and kind_of(t.grad)]
        return trace, losses, self._producers(trace, bad)

    def _producers(self, trace: Trace, bad: list[tuple[Tensor, Tensor]]) -> list[int]:
        found = set()
        for leaf, value in bad:
            key = key_of(value)
            found.add(trace.producer[key] if key in trace.producer else trace.orphan(leaf, value))
        return sorted(found)

    def _told(self, trace: Trace, losses: Losses, sinks: list[int]) -> Location:
        blamer = Blamer(trace.events)
        found = self._blame = blamer.blame(sinks)
        if not found.origins:
            return Location(reproduced=True, notes=("the bad value came from outside the step and cannot be followed",))
        places = [self._place(trace, blamer, found, origin) for origin in found.origins]
        first = places[0]
        component = next((name for name, term in losses.components.items() if kind_of(term)), "")
        named = first.mechanism in ("masked-row", "empty-reduction")  # what went wrong is known better than that
        if not kind_of(losses.total) and not named and _left_out(found.chain):
            value = "NaN" if found.chain[0].kind == NAN else "inf"
            why = f"the forward leaves this value out, so its gradient is exactly 0, and 0 · {value} has no value"
            first = dataclasses.replace(first, mechanism="where-gradient", why=f"{why}; {first.why}")
        notes = [*first.notes, *([f"after it {self._raised}"] if self._raised else self._differs(losses))]
        if trace.skipped:
            names = ", ".join(sorted(trace.skipped)[:4])
            notes.append(f"not looked at, because they cannot be read: {names}")
        end = "error" if self._raised else "loss" if kind_of(losses.total) else "gradient"
        return dataclasses.replace(
            first,
            chain=_way(found.chain, end),
            also=tuple(places[1:5]),
            component=component,
            notes=tuple(notes),
            commit=suspect_commit(first.file, first.line),
            loss=float(losses.total.detach()),
        )

    def _place(self, trace: Trace, blamer: Blamer, found: Blame, event: Event) -> Location:
        parents = relevant_parents(event)
        intentional = bool(parents) and not event.fresh and all(blamer.is_intentional(p) for p in parents)
        mechanism, why = mechanism_of(event, intentional)
        arrived = event.phase in ("leaf", "outside", "uninitialized")
        site = event.site
        if arrived and not site.stack:  # a value from outside is shown where it enters
            site = next((e.site for e in trace.events if event.number in (p for _, p in e.parents)), site)
        frames = frames_of(site.stack)
        own = own_frame(site.stack)
        file, line, function = frames[own] if frames else ("", 0, "")
        notes = []
        if event.number in found.masks:
            mask = found.masks[event.number]
            origin = frames_of(mask.site.stack)[own_frame(mask.site.stack)] if mask.site.stack else None
            said = (
                f"{call_name(mask.op)} at {origin[0]}:{origin[1]}" if origin else mask.leaf or "a tensor made elsewhere"
            )
            notes.append(f"the mask comes from {said}")
        leaf, writer = event.leaf, ""
        if leaf and event.output is not None and event.output.first_bad is not None:
            leaf = f"{leaf}{list(event.output.first_bad)}"
        if leaf.startswith("parameter") and self._optimizer is not None:
            parameter = next((p for p in self.sandbox.trained() if self.sandbox.names().get(id(p)) == event.leaf), None)
            said, wrote = writer_of(parameter, self._optimizer) if parameter is not None else ("", False)
            why = f"{why}; {said}" if said else why
            writer = type(self._optimizer).__name__ if wrote else ""
        phase: Phase = {"uninitialized": "outside"}.get(event.phase, event.phase)  # type: ignore[assignment]
        op = forward_op(event)
        return Location(
            reproduced=True,
            phase=phase,
            op=call_name(op) if op.endswith("Backward0") else op,
            file=file,
            line=line,
            function=function,
            stack=library_frames(site.stack),
            code=tuple(code_frame(file, line)),
            module=site.module,
            mechanism=mechanism,
            why=why,
            inputs=tuple(event.inputs),
            outputs=(event.output,) if event.output else (),
            leaf=leaf,
            notes=tuple(notes),
            written_by=writer,
        )

    def _if_left_out(self, found: Location, origin: Event) -> Location:
        """A gradient of zero may also be that of a value that counts, as at the bottom of a square: then say so."""
        if origin.dead is None or origin.site.call < 0:
            return found
        decisions: dict[int, list[Tensor]] = {}
        for by in (0.0, 1.0, -1.0):
            self.sandbox.reset()
            shift = Shift(origin.site.call, origin.dead, by, decisions, self._most)
            with shift:
                losses = Replay(self.step, self.sandbox, self._weights).forward()
            same = float(losses.total.detach()) == found.loss
            if not shift.shifted or same is bool(by):  # not the step that it was, or nothing depends on the value
                return found
        origin.dead = None
        mechanism, why = mechanism_of(origin, False)
        if origin.kind == NAN:
            why = f"{why.replace('undefined', 'infinite')}, and the gradient that comes in is 0: 0 · inf"
        return dataclasses.replace(found, mechanism=mechanism, why=why)

    def _before_zero(self, trace: Trace, found: Location, origin: Event) -> tuple[Location, Event]:
        """An overflow that was divided away (x / inf is 0) may be behind a zero that something stumbles over."""
        blamer = Blamer(trace.events)
        if origin.swallowed < 0 or origin.parents or blamer.is_intentional(origin.swallowed):
            return found, origin
        chain, source = [trace.events[origin.swallowed]], trace.events[origin.swallowed]
        while parents := relevant_parents(source):
            source = trace.events[parents[0]]
            chain.insert(0, source)
        if blamer.is_intentional(source.number) or not apart(lambda: bool(self._healed(source)[0]), False, "")[0]:
            return found, origin
        place = self._place(trace, blamer, self._blame, source)
        note = (
            f"it vanishes into a zero on the way: {call_name(found.op)} at {found.file}:{found.line} stumbles over that"
        )
        path = tuple(e.op for e in chain) + found.chain
        notes = (*place.notes, *found.notes, note)
        return dataclasses.replace(
            place,
            chain=path,
            component=found.component,
            notes=notes,
            loss=found.loss,
            commit=suspect_commit(place.file, place.line),
        ), source

    def _widened(self, found: Location, origin: Event) -> Location:
        """Tell a pole from a value that was rounded to zero before it: is the operand another in float64?"""
        if found.mechanism not in ("pole", "invalid") or found.phase not in ("forward", "backward"):
            return found
        self._say("replaying the forward pass in float64")
        self.sandbox.allow()
        self.sandbox.reset()
        model, keep = self.sandbox.model, self._differentiates
        step = functools.partial(self.sandbox.in_time, self.step)
        what = "replayed in float64"
        wide, remark = apart(
            lambda: in_float64(step, model, origin, keep_grad=keep, most=self._most),
            InFloat64(),
            what,
            needs_child=True,
        )
        self._wide = wide
        if remark:
            found = dataclasses.replace(found, notes=(*found.notes, remark))
        if not wide.finite:
            return found
        said = vanished_eps(origin) if not wide.elsewhere else ""
        if not said:
            reset = self.sandbox.reset
            (said, cancels), _ = apart(
                lambda: where_rounded(step, model, origin, reset, keep_grad=keep, most=self._most),
                ("", False),
                what,
                needs_child=True,
            )
            if wide.elsewhere and not cancels:
                return found
        why = f"{found.why}; in float64 it is finite: " + (said or "a value was rounded before")
        return dataclasses.replace(found, mechanism="underflow", why=why)

    def _proved(self, found: Location, origin: Event) -> Location:
        healed, patch = self._healed(origin)
        known = {(p.file, p.line) for p in (found, *found.also)}
        more: list[Location] = []
        if healed is False:
            more = [p for p in self._behind(origin, patch) if (p.file, p.line) not in known]
        if healed:
            why = next((said for kernel, said in other_kernels(origin) if self._finite((), kernel)), found.why)
            found = dataclasses.replace(found, why=why)
        doubt = ""
        if healed is False:
            doubt = "repairing it alone does not heal the step"
            doubt = "with it repaired the step does not end" if self._endless else doubt
        elif healed and self._differs_from_original:
            doubt = "the replay is not the original step"
        elif healed and origin.call >= 0:
            doubt = self._rounding_before(origin, found.mechanism == "range-overflow")
        if self._left:
            said = f"before it, not computed in float64: {', '.join(self._left[:4])}"
            found = dataclasses.replace(found, notes=(*found.notes, said))
        proved = None if healed is None or (healed and found.phase == "outside") else not doubt
        return dataclasses.replace(found, verified=proved, doubt=doubt, also=(*found.also, *more)[:6])

    def _rounding_before(self, origin: Event, overflows: bool) -> str:
        """Why rounding before the origin may be to blame; empty when it is not."""
        assert self._trace is not None
        self._say("replaying the step, rounded otherwise up to the operation")
        rounded = self._wide.fails_rounded
        proof = Rounding(
            Failure(origin, slope=rounded and origin.phase == "backward" and origin.site.call >= 0),
            self._trace.formats,
            sum(t.numel() for _, t in self.sandbox.leaves()),
            self._up_to,
            functools.partial(self._finite, ()),
            self._most,
            fails_rounded=rounded,
            overflows=overflows,
        )
        doubt = proof.doubt()
        self._left = proof.left
        return doubt

    def _up_to(self, mode: ReplayMode) -> None:
        """A replay that the mode ends where it has its answer."""
        self.sandbox.reset()
        replay = Replay(self.step, self.sandbox, self._weights)
        try:
            with mode:
                replay.backward(replay.forward())
        except OutOfTime:
            raise
        except (Reached, UsageError, Endless):  # a step that raises, or never ends, has not come to the origin
            pass

    def _healed(self, origin: Event) -> tuple[bool | None, Patch | None]:
        """Whether the step is finite when only the origin is repaired, and how; None when it cannot be tried.

        What a good value would have been is not known, so several are tried: zero, one, a large one; first in
        this operation alone, then wherever its line runs (a loop, a module used twice).
        """
        if origin.phase in ("leaf", "outside") and origin.leaf:
            return self.sandbox.repaired(origin.leaf, lambda: self._finite(())), None
        if origin.call < 0:
            return None, None
        frames = frames_of(origin.site.stack)
        place = frames[0][:2] if frames else ("", 0)
        patch = None
        for whole_line, fill in ((False, 0.0), (False, 1.0), (True, 0.0), (True, 1.0), (True, 1e30)):
            patch = Patch(call=origin.call, seq=origin.seq, place=place, whole_line=whole_line, fill=fill)
            if self._finite((patch,)):
                return True, patch
        return False, patch

    def _finite(self, patches: tuple[Patch, ...], kernel: AbstractContextManager[Any] | None = None) -> bool:
        """Whether the step, with patches or with other kernels, gives a finite loss and finite gradients."""
        self._say("replaying the step with the operation repaired" if patches else "replaying the step")
        self.sandbox.reset()
        replay = Replay(self.step, self.sandbox, self._weights)
        try:
            with Neutralize(patches, self._most), kernel or nullcontext():
                losses = replay.forward()
                if kind_of(losses.total):
                    return False
                replay.backward(losses)
        except UsageError:
            if self._raised:
                return False
            raise
        except OutOfTime:
            raise
        except Endless:
            self._endless = True
            return False
        return not any(kind_of(g) for _, g in replay.gradients())

    def _behind(self, origin: Event, patch: Patch | None) -> list[Location]:
        """Origins that show only when the first one is out of the way."""
        blame = self._blame

        def look() -> list[Location]:
            with Neutralize((patch,), self._most) if patch is not None else nullcontext():
                try:
                    trace, _, sinks = self._traced()
                except UsageError:
                    if self._raised:
                        return []
                    raise
                except OutOfTime:
                    raise
                except Endless:
                    return []
            blamer = Blamer(trace.events)
            return [self._place(trace, blamer, f, o) for f in [blamer.blame(sinks)] for o in f.origins]

        try:
            return self.sandbox.repaired(origin.leaf, look) if origin.leaf else look() if patch is not None else []
        finally:
            self._blame = blame

    @property
    def _differs_from_original(self) -> bool:
        return self._difference is not None

    _difference: str | None = None

    def _differs(self, losses: Losses) -> list[str]:
        """How far the replay's loss is from the original's; nothing when they are equal, bit for bit."""
        now, then = float(losses.total.detach()), self._expected
        if then is None or now == then or (math.isnan(now) and math.isnan(then)):
            return []
        self._difference = f"the replay's loss is {now:.9g}, the original's was {then:.9g}"
        return [self._difference]

    def _nothing(self, losses: Losses) -> Location:
        return Location(
            reproduced=False, notes=(_measured(losses), *self._differs(losses)), loss=float(losses.total.detach())
        )

    def _not_reproduced(self, losses: Losses) -> Location:
        from .differently import compiled_only, uninitialized

        notes = [_measured(losses), *self._differs(losses)]
        try:
            found = compiled_only(self.step, self.sandbox, self._weights) or uninitialized(self)
            if found is not None:
                return found
            if self._expected is not None and not math.isfinite(self._expected):
                again = sum(not self._finite(()) for _ in range(4))
                notes.append(f"{again} of 5 replays failed: data, random states or hardware differ from the original")
        except CollectiveRefused:
            raise
        except (Exception, Endless) as error:
            notes.append(f"other ways of running it could not be tried ({type(error).__name__}: {error})")
        if self._expected is None or math.isfinite(self._expected):
            notes.append(
                "if it failed before: the batch, the random states, the weights, the device or the versions differ"
            )
        return Location(reproduced=False, notes=tuple(notes), loss=float(losses.total.detach()))


def _left_out(chain: list[Event]) -> bool:
    """Whether a value of the forward pass does harm only where its own gradient, 0, is multiplied by it.

    Behind a finite loss a NaN was left out; an infinity may have been divided away as well.
    """
    if len(chain) < 2 or chain[0].phase != "forward":
        return False
    return chain[0].kind == NAN or chain[1].dead is not None


def _measured(losses: Losses) -> str:
    return f"loss {float(losses.total.detach()):.6g}, all gradients finite"


def _way(chain: list[Event], end: str) -> tuple[str, ...]:
    names = [e.op or e.leaf or "a value" for e in chain]
    return (*(n for i, n in enumerate(names) if i == 0 or n != names[i - 1]), end)


__all__ = ["UsageError", "has_peers", "locate"]
