"""Locate bad steps in a guarded run by itself, until that brings nothing new, within a budget of time and memory."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..locating import Location, locate
from ..locating.bounds import Endless, within
from ..locating.sandbox import Sandbox
from ..locating.update import Healthy, replayed_update
from ..location import code_frame
from ..losses import losses_of
from ..records import Verdict
from ..rng import random_states, set_random_states
from .heal_replay import as_it_was, run_once
from .ranks import Ranks
from .snapshots import Snapshot
from .step import OpenStep, Pass
from .training import Training

log = logging.getLogger("nanproof")


class AutoLocate:
    """Replays a bad step under a trace, before the optimizer steps, while its state is still there."""

    def __init__(
        self, training: Training, *, seconds: float, weights: Mapping[str, float], max_bytes: int = 256 << 20
    ) -> None:
        self._training, self._weights = training, weights
        self._left = seconds
        self._max_bytes = max_bytes
        self._places: set[tuple[str, int, str]] = set()
        self._settled: set[tuple[Any, ...]] = set()
        """Kinds of failure whose last location brought nothing new."""

    def find(
        self, step: OpenStep, verdict: Verdict, culprit: Pass | None, ranks: Ranks, older: Snapshot | None = None
    ) -> Location | None:
        """The origin of a bad step; None when this kind keeps leading to known places, or the budget is spent.

        Without a closure the model's part is replayed; what lies between its output and the loss is not. From a
        snapshot of an ``older`` state an update is replayed, to learn whether the optimizer wrote a bad parameter.
        """
        lockstep = ranks.any(ranks.sharded) and not ranks.alone
        if lockstep:
            culprit = _same_pass(step, verdict, culprit, ranks)
        replay = _replay(culprit, alone=ranks.alone)
        if lockstep and ranks.any(replay is None):  # all replay their part of it, or none does
            return None
        kind = (verdict.kind, verdict.level, verdict.names[:1], verdict.origin)
        worth_it = replay is not None and kind not in self._settled and self._left > 0
        if not ranks.any(worth_it):  # every rank must come to the same answer here
            several = ranks.alone and replay is None and culprit is not None and culprit.closure is None
            return culprit.capture.between(culprit.loss) if several and culprit is not None else None
        start = time.monotonic()
        found = self._try(replay, culprit, step, lockstep=lockstep) if replay else None
        if not ranks.alone and not lockstep:
            found = self._over_ranks(found, replay, step, verdict, culprit, ranks)
        self._left -= time.monotonic() - start
        reproduced = found is not None and found.reproduced
        place = (found.file, found.line, found.op) if found is not None else ("", 0, "")
        if not ranks.any(reproduced and place not in self._places):
            self._settled.add(kind)
        if found is None or not reproduced:
            return None
        self._places.add(place)
        if culprit is not None and found.leaf.partition("[")[0] in culprit.carried:
            why = f"{found.why}; the model itself has returned it before, and the loop carries it on"
            found = dataclasses.replace(found, why=why)
        state = found.leaf_kind == "parameter" or verdict.origin == "state"
        if state and older is not None and ranks.alone and culprit is not None and culprit.closure is not None:
            found = self._with_update(found, culprit, older)
        return dataclasses.replace(found, rank=None if ranks.alone else ranks.rank)

    def blame(self, step: OpenStep) -> Pass | None:
        """Which pass of a window makes a gradient that is not finite: they are run again one by one, without ranks."""
        if self._training.sharded:
            return None
        start = time.monotonic()
        try:
            for one in step.passes:
                if not one.capture.gradients_are_finite:
                    return one
                play = _replay(one, alone=True)
                if play is None or time.monotonic() - start > self._left:
                    return None
                with as_it_was(self._training.slots):
                    set_random_states({**random_states(), **step.before.random, **one.random})
                    weights = self._weights if one.closure is not None else None
                    if not run_once(play, self._training, lockstep=False, weights=weights).finite:
                        return one
        except (Exception, Endless) as error:
            log.warning("nanproof: the micro-batch to blame was not found: %s: %s", type(error).__name__, error)
        finally:
            self._left -= time.monotonic() - start
        return None

    def _over_ranks(
        self,
        found: Location | None,
        replay: Callable[[], Any] | None,
        step: OpenStep,
        verdict: Verdict,
        culprit: Pass | None,
        ranks: Ranks,
    ) -> Location | None:
        """What ranks that have replayed their own parts learn from each other."""
        refused = found is not None and not found.reproduced and found.mechanism == "communication"
        if not ranks.any(not refused):  # the step communicates by itself on every rank: all replay it together
            found = self._try(replay, culprit, step, lockstep=True) if replay is not None else None
            reduced = found is not None and found.reproduced and found.mechanism == "communication"
            if not ranks.any(not reduced) and found is not None:
                before = found.why.partition(":")[0].replace("this rank", "every rank")
                found = dataclasses.replace(found, why=f"{before}: the reduction left the range of its dtype")
            return found
        same = found is not None and not found.reproduced and culprit is not None
        if same and found is not None and culprit is not None and culprit.closure is not None:
            same = culprit.loss is not None and found.loss == float(culprit.loss)
        apart = ranks.ddp and verdict.level == "gradient" and len(step.passes) == 1
        if ranks.any(not (apart and same)) or culprit is None:
            return found
        file, line, function = culprit.closure.written if culprit.closure is not None else culprit.capture.called
        hooks = [getattr(hook, "__name__", "") for w in ranks.wrappers for hook, _ in getattr(w, "_comm_hooks", ())]
        through = f" by {hooks[0]}" if hooks else ""
        return Location(
            reproduced=True,
            phase="outside",
            mechanism="communication",
            op="all_reduce",
            file=file,
            line=line,
            function=function,
            code=tuple(code_frame(file, line)),
            module="DistributedDataParallel",
            verified=True,
            why=f"the gradients of each of {ranks.world} ranks are finite, their reduction{through} is not: "
            f"{', '.join(verdict.names[:3])}",
        )

    def _try(
        self, replay: Callable[[], Any], culprit: Pass | None, step: OpenStep, *, lockstep: bool
    ) -> Location | None:
        assert culprit is not None
        if step.before.taken:
            step.rewind(culprit)
        batch = culprit.batch if culprit.inputs is None else culprit.inputs
        optimizers = self._training.optimizers
        try:
            found = locate(
                replay,
                model=self._training.model,
                batch=batch,
                max_bytes=self._max_bytes,
                lockstep=lockstep,
                loss_weights=self._weights if culprit.closure is not None else None,
                optimizer=optimizers[0] if len(optimizers) == 1 else None,
                loss=float(culprit.loss) if culprit.closure is not None and culprit.loss is not None else None,
                seconds=None if lockstep else self._left,
            )
            if culprit.closure is None:  # the loss of that replay is not the loop's
                found = dataclasses.replace(found, loss=None)
                if not found.reproduced:
                    found = culprit.capture.between(culprit.loss) or found
        except Exception as error:
            log.warning("nanproof: the bad step could not be located: %s: %s", type(error).__name__, error)
            return None
        return found

    def _with_update(self, found: Location, culprit: Pass, older: Snapshot) -> Location:
        """The location with what an update from an older, healthy state shows."""
        training = self._training
        if len(training.optimizers) != 1 or culprit.closure is None or self._left <= 0:
            return found
        (optimizer,) = training.optimizers
        try:
            sandbox = Sandbox(training.model, culprit.batch, culprit.closure.again)
            again = culprit.closure.again

            def play() -> None:
                with torch.enable_grad():
                    losses_of(again(), self._weights).total.backward()  # type: ignore[no-untyped-call]

            with sandbox.kept(), older.borrowed():
                sandbox.clear()
                within(self._left, play)
                gradients: dict[Tensor, Tensor] = {
                    p: p.grad.detach() for _, p in training.parameters if p.grad is not None
                }
            before = Healthy(
                update=older.update, values=older.values(), state=older.optimizer_state(optimizer), gradients=gradients
            )
            said, proved = replayed_update(optimizer, before, {p: n for n, p in training.parameters})
        except (Exception, Endless) as error:  # the location stands without it
            log.warning("nanproof: an update could not be replayed: %s: %s", type(error).__name__, error)
            return found
        if not said:
            return found
        found = dataclasses.replace(found, notes=(*found.notes, said))
        if not proved or not found.leaf:
            return found
        return dataclasses.replace(found, verified=True, doubt="", replayed=True, written_by=type(optimizer).__name__)


def _same_pass(step: OpenStep, verdict: Verdict, culprit: Pass | None, ranks: Ranks) -> Pass | None:
    """This rank's part of the pass that the rank to blame wants replayed: micro-batches pair by their number."""
    mine = next((i for i, one in enumerate(step.passes, 1) if one is culprit), 0)
    first = ranks.lowest(mine > 0)
    to_blame = verdict.rank if verdict.rank is not None else first
    number, _ = ranks.hear(to_blame, mine) if to_blame is not None else (0, "")
    return step.passes[number - 1] if 0 < number <= len(step.passes) else None


def _replay(culprit: Pass | None, *, alone: bool) -> Callable[[], Any] | None:
    if culprit is None:
        return None
    if culprit.closure is not None:
        return culprit.closure.again if culprit.closure.faithful else None
    return culprit.capture.step(alone=alone)
