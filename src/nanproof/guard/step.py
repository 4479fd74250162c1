"""One optimizer step while it is open: what went in, what was measured, and what was decided about it.

A driver opens a step (`Engine.begin`), tells it what the loop does (`saw`), asks for a decision (`Engine.judge`),
carries it out or not, and closes the step (`Engine.finish`). A step that ends in an exception is `abandoned`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..captured import CapturedState
from ..forecast import EarlyWarning
from ..losses import Losses
from ..records import Action, Reading, Verdict
from ..rng import set_random_states
from ..tensors import is_finite, tensors_in
from .forward_capture import ForwardCapture
from .frozen import FrozenClosure
from .readback import Arrived, Sent, Signals

if TYPE_CHECKING:
    from .engine import Engine
    from .optimizer_groups import OptimizerGroup


@dataclass
class Pass:
    """One forward pass of a step: a micro-batch."""

    batch: Any = None
    """The batch, as far as it is known."""
    about: str = ""
    """Which batch it is, in words: its number, its dataset indices."""
    inputs: Any = None
    """What went into the model, where that is a copy of the batch; a replay sees the copy."""
    carried: frozenset[str] = frozenset()
    """Inputs that the model itself has returned in the step before, as a recurrent state, by the names of locations."""
    capture: ForwardCapture = field(default_factory=ForwardCapture)
    random: Mapping[str, Any] = field(default_factory=dict)
    """Random states that differ from those at the start of the step."""
    closure: FrozenClosure | None = None
    """The loop's own code for this pass, to be run again with what it saw."""
    loss: Tensor | None = None

    @property
    def has_bad_input(self) -> bool:
        return any(not is_finite(t) for _, t in tensors_in(self.batch))


@dataclass
class OpenStep:
    """What is known of a step between `begin` and `finish`."""

    engine: Engine
    group: OptimizerGroup
    number: int
    before: CapturedState
    """Random states and buffers before its first forward pass, once captured."""
    scaler: Any
    """The GradScaler that this step's loss went through, or None."""
    scale: float | None = None
    """The last loss scale that was finite."""
    local: bool = False
    """Whether this rank judges it alone: single micro-batches under DDP, uneven data inside DDP's join()."""
    micro: bool = False
    """Whether it is one micro-batch of a window, judged by itself."""
    empty: bool = False
    """Whether every micro-batch of the window was left out."""
    deferred: bool = False
    """Whether the device has decided by itself, and the host learns of it a step later."""
    passes: list[Pass] = field(default_factory=list)
    signals: Signals = field(default_factory=Signals)
    undoable: bool = True
    """Whether the state was captured before its first forward pass, not after the last update."""
    divided: bool = False
    """Whether the losses of micro-batches were divided by their number, so that their sum is the step's loss."""
    measure: Callable[[], Tensor] | None = None
    """Computes the unscaled gradient norm on the device, where it is not simply that of the gradients."""
    beside: Sequence[tuple[str, nn.Parameter]] = ()
    """Parameters that no optimizer steps, but that the loop clips together with those of this step."""
    data: int | None = None
    """Which data it trains on, so that a streak counts distinct data; None when each step has its own."""
    position: int = 0
    """The loop's place in its data; ranks compare theirs."""
    random_after: Callable[[Mapping[str, Any], bool], Mapping[str, Any]] | None = None
    """External loops: the random states to leave behind a bad step, given those before the verdict and whether the
    step was undone."""
    name_batch: Callable[[Pass], None] | None = None
    """External loops: finds out which batch a pass was trained on, when somebody wants to know."""
    announced: bool = False
    sent: Sent | None = None
    state_is_bad: bool = False
    """Whether parameters, buffers or moments were found bad, or single micro-batches fail too often."""
    snapshot_agreed: bool = False
    """On several ranks: whether all of them take a snapshot after this step."""
    warned: EarlyWarning | None = None
    """On several ranks: the early warning that all of them answer after this step."""
    hyperparameters: tuple[str, ...] = ()
    """Options of the optimizers that were not finite."""
    broken: str = ""
    """Why its gradients cannot be used, whatever their values: an exception left them incomplete."""

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self.group.parameters

    def next_pass(self) -> None:
        """Another forward pass of the step begins."""
        self.engine.next_pass(self)

    def saw(self, losses: Losses, batch: Any = None, *, announce: bool = False) -> None:
        """A forward pass has ended with these losses; ``announce`` when it is the last one before the verdict."""
        self.engine.see(self, losses, batch, announce=announce)

    def abandon(self, error: BaseException, *, state: CapturedState | None = None) -> None:
        """The loop raised inside the step: leave everything as before it, or as before its last pass (``state``)."""
        self.engine.abandon(self, error, state or self.before)

    def died(self, error: BaseException) -> None:
        """The loop ends by an exception behind the last pass of the step."""
        self.engine.died(self, error)

    def culprit(self, bad: Sequence[str]) -> Pass | None:
        """The pass that a bad step is to be blamed on, given what was bad; None when that is not clear."""
        if self.name_batch is not None:
            for one in self.passes:
                self.name_batch(one)
        if len(self.passes) == 1:
            return self.passes[0]
        named = [b.removeprefix("loss:micro-batch ") for b in bad if b.startswith("loss:micro-batch ")]
        with_loss = [p for p in self.passes if p.loss is not None]
        if named and int(named[0]) < len(with_loss):
            return with_loss[int(named[0])]
        return next((p for p in self.passes if p.has_bad_input), None)

    def rewind(self, one: Pass | None) -> None:
        """Buffers and random states as before a pass that is to be run again, which may not be the first."""
        self.before.restore()
        if one is not None and one.random and one.closure is None:
            set_random_states({**self.before.random, **one.random})

    @property
    def closures(self) -> list[FrozenClosure] | None:
        """All passes as closures that can be run again; None when one of them cannot."""
        found = [p.closure for p in self.passes]
        return [c for c in found if c is not None] if found and all(found) else None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The answer to one step: what was seen, what is done, and what the driver needs to do it."""

    verdict: Verdict
    action: Action
    reading: Reading
    norm: Tensor | float | None = None
    """The gradient norm for clipping; None when it could not be computed, so that torch's own clipping must."""
    good: Tensor | None = None
    """Deferred timing: the device's flag, true when the step is good."""
    scale: float | None = None
    """The loss scale that the scaler is to have after a step that was not carried out."""
    early: Sequence[Arrived] = ()
    """Early signs of trouble."""

    @property
    def go(self) -> bool:
        """Whether the update is to be made."""
        return self.action.kind in ("commit", "rerun", "heal")
