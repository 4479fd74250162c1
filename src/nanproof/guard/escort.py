"""The guard beside a loop that takes its steps itself: a trainer's, or a script's under `nanproof run`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..rng import random_states
from .draws import Draws
from .ears import Ear
from .guard import Guard
from .hearing import Hearing
from .rounds import Decision, Parties, Pass, Round
from .signals import Losses

log = logging.getLogger("nanproof")


class _Veto(BaseException):
    """Leaves an optimizer's step before it changes anything."""


class Escort:
    """Translates what a foreign loop does into what a guard needs to know, and the guard's answer into go or no go.

    The loop, or whoever listens to it, says `begin` before a forward pass, `meet` before and `passed` after a
    backward pass, asks `judge` before clipping, and lets `step` carry an optimizer step out or leave it. Several
    optimizers may step together or take turns; which of them do is learned from the loop.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        divided: bool | None = False,
        scaled: bool = True,
        listen_to: Sequence[nn.Module] | None = None,
    ) -> None:
        """``divided``: losses of micro-batches come divided by their number (None: seen from the loss itself).
        ``scaled``: every loss goes through the guard's scaler; else `meet` says which one it went through.
        ``listen_to``: the modules whose forward passes begin steps, if not the model's own."""
        self.guard = guard
        self._post, self._probe, t = guard._post, guard._probe, guard.training
        self._divided = divided
        self._scaler = t.scaler if scaled else None
        self._post.hands_off = t.defers_scale = True
        self._numbers = {id(o): i for i, o in enumerate(t.optimizers)}
        self._parties = Parties(t.optimizers, self._post.window, self._post.history)
        self._round: Round | None = None
        self._busy = self._in_backward = False
        self._depth = 0
        self._draws = Draws()
        self._hearing = Hearing(guard, self._parties, self._draws)
        self._tries, self._updates = [0] * len(t.optimizers), [0] * len(t.optimizers)
        self._followers: weakref.WeakKeyDictionary[Any, tuple[int, int, bool]] = weakref.WeakKeyDictionary()
        self._several_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.carried_out = True
        """Whether the last step was carried out."""
        guard.tally.steps = guard.tally.updates  # a run that was resumed goes on counting
        guard._release()
        self._at_close: list[Callable[[], None]] = []
        self.hooks: list[RemovableHandle] = []
        self._parts = [part for root in t.roots for part in root.children()]
        for module in t.roots if listen_to is None else listen_to:
            self.listen(module)

    # --- passes -----------------------------------------------------------------------------------------------

    def listen(self, module: nn.Module) -> None:
        """Let the training forward passes of a module begin steps."""
        self.hooks.append(module.register_forward_pre_hook(Ear(self.before_forward), with_kwargs=True))
        self.hooks.append(module.register_forward_hook(Ear(self.after_forward), always_call=True))

    def _listen_closer(self) -> None:
        """The model itself is not called: its parts may be."""
        parts, self._parts = self._parts, []
        for part in parts:
            self.listen(part)

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._listens(module):
            return
        self._depth += 1
        if self._depth > 1:
            return
        self.begin()
        with self._post.surviving("looking at a forward pass"):
            self._draws.enter()
            assert self._round is not None
            here = self._round.passes[-1]
            here.delivered = tuple(self._post.feed.delivered())  # a pass that came to nothing may have gone before
            here.take(module, args, kwargs)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._listens(module) or self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0 and self._round is not None and output is not None:
            with self._post.surviving("looking at a forward pass"):
                self._round.passes[-1].seam.after(module, output)
                self._draws.leave()

    def _listens(self, module: nn.Module) -> bool:
        inside = self._busy or self._in_backward  # activation checkpointing plays forward passes again
        return not inside and module.training and torch.is_grad_enabled() and self.guard.open

    def begin(self, batch: Any = None) -> None:
        """A forward pass is about to begin: remember random states and buffers."""
        if not self._busy and self.guard.open:
            with self._post.surviving("beginning a step"):
                self._begin(batch)

    def _begin(self, batch: Any) -> None:
        current = self._round
        if current is None or current.decisions:
            current = self._new_round()
            current.began = True
            self._post.moment.capture()
            self._draws.begin()
            random = self._post.moment.random
        elif current.forward:
            if batch is not None:
                current.passes[-1].batch = batch
            return
        else:
            self._draws.enter()
            random = {k: v for k, v in random_states().items() if k in ("torch", "cuda")}
        current.forward = True
        current.passes.append(Pass(batch=batch, delivered=tuple(self._post.feed.delivered()), random=random))
        self._post.feed.begin()
        self._post.taps.clear()
        self._post.taps.listen()
        self.guard._watches.begin(self.guard.tally.steps)

    def _new_round(self) -> Round:
        self._settle()
        self._probe.clear()
        self._round = Round(scaler=self._scaler, divided=bool(self._divided))
        return self._round

    def meet(self, loss: Any, value: Tensor | None = None, *, scaler: Any = None) -> None:
        """A loss is on its way into backward; ``value`` is what it stands for where it was scaled or divided."""
        if not self._busy and self.guard.open:
            with self._post.surviving("looking at a loss"):
                self._meet(loss, value, scaler)

    def _meet(self, loss: Any, value: Tensor | None, scaler: Any) -> None:
        current = self._round
        if current is None or current.decisions:
            current = self._new_round()
        self._draws.enter()
        self._in_backward = True
        current.forward = False
        current.backwards += 1
        current.scaler = scaler or current.scaler
        if not current.passes:
            current.passes.append(Pass(delivered=tuple(self._post.feed.delivered())))
        here = current.passes[-1]
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            shown = loss if value is None else value
            if self._divided is None:
                current.divided = _is_share(shown)
            current.losses.append(here)
            self._probe.see(Losses(total=shown.detach().reshape(()), components={}))
            if self._several_ranks:  # a bad loss must reach the other ranks through the gradients
                good = torch.isfinite(shown.detach())
                loss.register_hook(lambda g: torch.where(good, g, torch.nan))  # type: ignore[no-untyped-call]
            here.seam.meet_backward(loss)
        self._probe.look(here.seen, None)

    def passed(self) -> None:
        """A backward pass is over, however it ended."""
        self._in_backward = False
        if not self._busy:
            self._draws.leave()

    # --- steps ------------------------------------------------------------------------------------------------

    def owns(self, optimizer: Any) -> bool:
        return id(optimizer) in self._numbers

    def judge(self, optimizer: Optimizer) -> bool:
        """Whether the step may be carried out: asked before clipping, and again at the step itself."""
        if not self.guard.open:
            if self._post.stopped is not None:
                raise self._post.stopped  # a loop that catches everything does not go on unguarded
            return True
        number = self._numbers[id(optimizer)]
        current = self._round or self._new_round()
        for decision in current.decisions:
            if number in decision.members and number not in decision.stepped:
                return decision.go
        self._settle()
        members = self._parties.of(number)
        with self._at_work():
            go = self._hearing.decide(current, members)
        current.decisions.append(Decision(members, go))
        return go

    def step(
        self, optimizer: Optimizer, carry_out: Callable[..., Any], closure: Callable[[], Any] | None = None
    ) -> Any:
        """Carry a step out, or leave it; with a closure the verdict comes after its first run."""
        returned: list[Any] = []

        def judged() -> Any:
            assert closure is not None
            returned.append(closure())
            if len(returned) == 1 and not self.judge(optimizer):
                raise _Veto
            return returned[-1]

        if closure is None and not self.judge(optimizer):
            self.left(optimizer)
            return None
        try:
            with self._post.backoff.on(optimizer):
                result = carry_out(judged) if closure is not None else carry_out()
        except _Veto:
            self.left(optimizer)
            return returned[0]
        self._stepped(optimizer, done=True)
        return result

    def left(self, optimizer: Optimizer) -> None:
        """The loop has left a vetoed step out."""
        self._stepped(optimizer, done=False)

    def held_scale(self, scaler: Any) -> float | None:
        """The scale that a scaler is to take at its next update, after a veto; said once."""
        return self._hearing.held.pop(id(scaler), None)

    def advances(self, follower: Any, optimizer: Any = None) -> bool:
        """Whether a schedule or an average may move on: only if an update was carried out since it last did."""
        some = [self._numbers[id(optimizer)]] if optimizer is not None else range(len(self._tries))
        tries, updates = sum(self._tries[i] for i in some), sum(self._updates[i] for i in some)
        known_tries, known_updates, answer = self._followers.get(follower, (0, 0, True))
        if tries != known_tries:
            answer = updates > known_updates
        self._followers[follower] = (tries, updates, answer)
        return answer

    def _stepped(self, optimizer: Optimizer, *, done: bool) -> None:
        number = self._numbers[id(optimizer)]
        self.carried_out = done
        self._tries[number] += 1
        self._updates[number] += done
        decisions = self._round.decisions if self._round is not None else []
        decision = next((d for d in reversed(decisions) if number in d.members), None)
        if decision is not None:
            decision.stepped.add(number)
            if decision.stepped >= set(decision.members):
                self._settle()

    def _settle(self) -> None:
        """Account for the last decision once its steps are taken: learn who stepped, count, take a snapshot."""
        current, post = self._round, self._post
        if current is None or not current.decisions:
            return
        decision = current.decisions[-1]
        self._parties.learn(decision.stepped)
        promised, post.promised = post.promised, None
        if promised is None:
            return
        if not decision.stepped:  # the loop itself left a good step out, or clips more often than it steps
            self.guard.tally.steps -= 1
            return
        with self._at_work():
            post.account(*promised)
            self._parties.keep(decision.members, post.window, post.history)
            if current.began:
                post.moment.forget()
            else:  # a forward pass that nobody saw: buffers, at least, can be put back the next time
                post.moment.capture()
                self._listen_closer()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """A block of the guard's own: the passes that it plays again are none of the loop's."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    # --- saves, state, the end --------------------------------------------------------------------------------

    def blocks_save(self, path: Any, *, agree: bool = False) -> bool:
        """Whether a save of the training state must not happen, because the state is not finite; said loudly.

        With ``agree`` all ranks come to the same answer; all must ask.
        """
        if self._post.policy.mode == "observe" or not self.guard.open:
            return False
        self._settle()
        sick = self.guard.training.sick()
        if not (self._post.ranks.any(bool(sick)) if agree else sick):
            return False
        what = f"{sick[0][0]} {sick[0][1]}" if sick else "a tensor on another rank"
        self._post.block(path, what, suspect=agree or self._post.ranks.alone)
        return True

    def summary(self) -> str:
        """What happened so far, in a few lines."""
        return self.guard.summary()

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return self.guard.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.guard.load_state_dict(state)
        everyone = tuple(range(len(self._tries)))
        self._parties.keep(everyone, self._post.window, self._post.history)

    def close(self) -> None:
        """End the run: account for what is pending, leave the model, write the log, say what happened."""
        if self.guard.open:
            self._settle()
        for hook in self.hooks:
            hook.remove()
        while self._at_close:
            self._at_close.pop()()
        self.guard.close()

    def on_close(self, action: Callable[[], None]) -> None:
        """What is to be done at the end, such as to leave a trainer as it was."""
        self._at_close.append(action)


def _is_share(loss: Tensor) -> bool:
    """Whether a loss was just divided by, or multiplied with, a constant, as losses of micro-batches are."""
    node = loss.grad_fn
    if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
        return False
    return any(function is None for function, _ in node.next_functions)
