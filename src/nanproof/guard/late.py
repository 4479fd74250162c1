"""The "late" timing: the device vetoes by itself, the host learns of it a step later."""

from __future__ import annotations

from torch import Tensor

from ..records import Action, Verdict
from . import act
from .post import Post
from .probe import Probe


class Late:
    """Carries steps out without reading anything; accounts for each when the next one comes."""

    def __init__(self, post: Post, probe: Probe) -> None:
        self._post = post
        self._probe = probe
        self._schedules: list[dict[str, object]] = []
        self._rates: list[float | Tensor] = []

    def commit(self, good: Tensor, norm: Tensor) -> Verdict:
        """Step under the device's veto: a bad step changes neither parameters, moments, counters nor buffers."""
        post, t = self._post, self._post.training
        act.clip(t, post.max_norm, norm)
        act.step_optimizers(t, post.backoff, veto=~good)
        post.moment.select_buffers(good)
        self._schedules = [s.state_dict() for s in t.schedulers]
        self._rates = [g["lr"] for o in t.optimizers for g in o.param_groups]
        if t.scaler is not None:
            t.scaler.update()
        act.step_schedulers(t, 0.0)
        return Verdict(kind="ok", step=post.tally.steps)

    def catch_up(self) -> Verdict | None:
        """Account for the step before; its verdict when the run had to go back, so that the current step is void."""
        if not self._probe.pending:
            return None
        post, t = self._post, self._post.training
        seen = self._probe.late(post.ranks.world)
        verdict = post.judge(seen)
        if verdict.ok:
            post.after_update(seen.reading)
            post.finish(verdict, Action(kind="commit"), seen.reading)
            post.warn(seen)
            return None
        # the schedule moved on before the verdict was known; the learning rate of this step is still to be used
        for scheduler, state in zip(t.schedulers, self._schedules, strict=True):
            scheduler.load_state_dict(state)
        for group, lr in zip((g for o in t.optimizers for g in o.param_groups), self._rates, strict=True):
            group["lr"] = lr
        action = post.decide(verdict)
        if action.kind == "commit":
            action = Action(kind="skip", reason=action.reason)  # the device has vetoed it already
        post.note(verdict, action, [])
        if action.kind != "skip":
            post.go_back(verdict, action)
        post.finish(verdict, action, seen.reading)
        return verdict if action.kind != "skip" else None
