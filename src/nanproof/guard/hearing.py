"""The verdict on a step that a foreign loop takes: read its gradients, judge, undo what is bad, promise the rest."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..errors import NanproofError
from ..records import Action
from ..rng import random_states, set_random_states
from .draws import Draws
from .guard import Guard
from .probe import Seen
from .rounds import Parties, Party, Pass, Round
from .seam import Seam
from .signals import total_norm


class Hearing:
    """Hears one round at a time."""

    def __init__(self, guard: Guard, parties: Parties, draws: Draws) -> None:
        self._guard, self._parties, self._draws = guard, parties, draws
        self.held: dict[int, float] = {}
        """By scaler: the scale that it is to take after a veto."""

    def decide(self, current: Round, members: Party) -> bool:
        """Whether a party of optimizers may step with the gradients that it has."""
        post, t = self._guard._post, self._guard.training
        post.window, post.history = self._parties.memory(members)
        post.renew()
        t.judged, t.scaler = self._parameters(members), current.scaler
        self._guard.tally.steps += 1
        self._draws.enter()
        try:
            if post.ring.state_is_bad():
                now = random_states()
                post.answer_state()
                if post.taken.kind != "commit":
                    set_random_states(now)
                    return False
            self._read_and_answer(current, members)
        finally:
            self._parties.keep(members, post.window, post.history)
            held = t.take_held_scale()
            if held is not None:
                self.held[id(current.scaler)] = held
        return post.promised is not None

    def _read_and_answer(self, current: Round, members: Party) -> None:
        post = self._guard._post
        try:
            seen = self._read(current, members)
            verdict = post.judge(seen)
        except NanproofError:
            raise
        except Exception as error:  # the guard's own failure must never end a healthy run
            post.answer_failure(error)
            return
        if not current.losses:  # a loop that makes its gradients in another way: its loss is not known
            seen = dataclasses.replace(seen, reading=dataclasses.replace(seen.reading, loss=math.nan))
        if verdict.ok:
            post.commit(seen, verdict, Action(kind="commit"))
            return
        now = random_states()
        first = dict(current.passes[0].random) if current.began else {}
        outside = self._draws.since(first, now, len(current.passes))
        self._show(current, current.culprit(seen.reading.bad))
        verdict = post.answer(seen, verdict, None)
        skipped = post.promised is None and post.taken.kind == "skip"
        undone = current.began and skipped and verdict.origin != "scale"  # GradScaler's own search leaves its traces
        # what the loop drew stays drawn, and after a rollback the data goes on from where it is
        kept = outside if undone else set(now)
        set_random_states({k: now[k] if k in kept else first.get(k, now[k]) for k in now})

    def _show(self, current: Round, culprit: Pass | None) -> None:
        """Put the pass to blame before the guard: its batch, its inputs, its random states."""
        post = self._guard._post
        post.feed.played = culprit.copied if culprit is not None else None
        if culprit is None:
            post.seam = Seam()
            post.feed.batch, post.feed.about = [p.name_batch()[0] for p in current.passes], ""
            return
        post.seam = culprit.seam
        post.feed.batch, post.feed.about = culprit.name_batch()
        if post.moment.taken and culprit.random:
            post.moment.random.update(culprit.random)

    def _read(self, current: Round, members: Party) -> Seen:
        """The step's numbers on the host, with the loss scale taken out."""
        post, t = self._guard._post, self._guard.training
        scale = t.scale()
        limits = post.limits(post.window)
        norm = self._norm(current, members, scale)
        shared = None
        if not post.ranks.alone:
            post.ranks.start(self._guard._probe.flags(limits, divided=current.divided), current.backwards)
            shared = post.ranks.finish()
        lr = float(t.optimizers[members[0]].param_groups[0]["lr"])
        good = self._guard._probe.send(
            step=self._guard.tally.steps, lr=lr, norm=norm, scale=scale, shared=shared, limits=limits,
            divided=current.divided,
        )  # fmt: skip
        seen = self._guard._probe.now(good, post.ranks.world)
        if self._parties.several and current.losses:
            name = "+".join(self._name(i) for i in members)
            named = dataclasses.replace(seen.reading, components={f"loss {name}": seen.reading.loss})
            return dataclasses.replace(seen, reading=named)
        return seen

    def _norm(self, current: Round, members: Party, scale: Tensor | None) -> Tensor:
        t = self._guard.training
        scaled = tuple(i for i in members if scale is not None and _is_scaled(current.scaler, t.optimizers[i]))
        if not scaled:
            return total_norm([g for _, g in t.gradients()])
        assert scale is not None
        t.judged = self._parameters(scaled)
        norms = [total_norm([g for _, g in t.gradients()]) / scale]
        if len(scaled) < len(members):
            t.judged = self._parameters(tuple(i for i in members if i not in scaled))
            norms.append(total_norm([g for _, g in t.gradients()]))
        t.judged = self._parameters(members)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
        return total

    def _parameters(self, members: Party) -> list[tuple[str, nn.Parameter]]:
        t = self._guard.training
        if len(members) == len(t.optimizers):
            return t.parameters
        owned = {id(p) for i in members for g in t.optimizers[i].param_groups for p in g["params"]}
        return [(n, p) for n, p in t.parameters if id(p) in owned]

    def _name(self, number: int) -> str:
        """An optimizer by the part of the model that it trains."""
        names = {n.partition(".")[0] for n, _ in self._parameters((number,))}
        return names.pop() if len(names) == 1 else str(number)


def _is_scaled(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether a scaler has not unscaled the gradients of an optimizer yet."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    return state is None or state["stage"] is OptState.READY
