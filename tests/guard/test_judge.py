"""The pure parts: window, judge, policy; no trainer, no rank, no clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanproof.errors import UsageError
from nanproof.guard.judge import judge
from nanproof.guard.policy import History, Policy, Recoveries, decide
from nanproof.guard.window import Limits, Window
from nanproof.records import Action, Reading, Verdict

STEPS = 100_000


def curves() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Clean loss and gradient-norm curves of many characters; no spike in any."""
    rng = np.random.default_rng(0)
    t = np.arange(STEPS)
    decay = 2.0 + 8.0 * np.exp(-t / 3000)
    warm = np.minimum(1.0, (t + 1) / 2000)
    return {
        "decaying loss, log-normal norms": (
            decay * (1 + 0.05 * rng.standard_normal(STEPS)),
            np.exp(0.35 * rng.standard_normal(STEPS)),
        ),
        "noisy small batches": (
            np.abs(0.7 + 0.12 * rng.standard_normal(STEPS)),
            np.exp(0.5 * rng.standard_normal(STEPS)),
        ),
        "heavy tails": (
            1.0 + 0.05 * rng.standard_t(6, STEPS),
            np.exp(0.3 * rng.standard_t(8, STEPS)),
        ),
        "warm-up and cosine": (
            4 * np.exp(-t / 20_000) + 0.5 + 0.05 * rng.standard_normal(STEPS),
            (0.2 + 5 * (1 - warm)) * np.exp(0.3 * rng.standard_normal(STEPS)),
        ),
        "likelihood below zero": (
            -3.0 + 0.1 * rng.standard_normal(STEPS) - 2 * (t / STEPS),
            20 * np.exp(0.3 * rng.standard_normal(STEPS)),
        ),
        "loss to zero": (
            np.abs(np.exp(-t / 8000) * (1 + 0.2 * rng.standard_normal(STEPS))) + 1e-5,
            np.exp(-t / 20_000) * np.exp(0.4 * rng.standard_normal(STEPS)) + 1e-6,
        ),
        "epochs": (
            1.5 + 0.3 * ((t // 500) % 2) + 0.05 * rng.standard_normal(STEPS),
            (1 + 0.5 * ((t // 500) % 2)) * np.exp(0.3 * rng.standard_normal(STEPS)),
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", list(curves()))
def test_no_false_alarm_in_100k_clean_steps(name: str) -> None:
    losses, norms = curves()[name]
    window = Window()
    alarms = []
    for i, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
        # limits move slowly: asking every 16th step keeps this test quick and judges every step
        if i % 16 == 0:
            limits = window.limits()
        if not judge(Reading(step=i, loss=loss, grad_norm=norm, lr=1e-4), limits).ok:
            alarms.append((i, loss, norm, limits))
        window.add(loss=loss, grad_norm=norm)
    assert alarms == []


@pytest.mark.parametrize("name", list(curves()))
def test_a_harmful_spike_is_seen_on_every_curve(name: str) -> None:
    losses, norms = (c[:5000] for c in curves()[name])
    window = Window()
    for loss, norm in zip(losses.tolist(), norms.tolist(), strict=True):
        window.add(loss=loss, grad_norm=norm)
    limits = window.limits()
    usual = float(np.median(norms[-128:]))
    assert judge(Reading(step=1, loss=float(losses[-1]), grad_norm=1000 * usual, lr=0), limits).kind == "spike"


def test_a_large_loss_with_ordinary_gradients_is_no_spike() -> None:
    window = Window()
    for _ in range(128):
        window.add(loss=0.01, grad_norm=1.0)
    assert judge(Reading(step=1, loss=5.0, grad_norm=2.0, lr=0), window.limits()).ok


def test_what_a_run_reaches_now_and_then_is_no_spike() -> None:
    """One batch in fifty holds a rare class: the median knows nothing of it."""
    window = Window()
    for i in range(1000):
        window.add(loss=0.01, grad_norm=1.0 if i < 64 or i % 50 == 0 else 0.02 + 0.001 * (i % 3))
    limits = window.limits()
    assert judge(Reading(step=1, loss=1.0, grad_norm=1.5, lr=0), limits).ok
    assert judge(Reading(step=1, loss=1.0, grad_norm=20.0, lr=0), limits).kind == "spike"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300))
def test_nothing_non_finite_enters_the_window(values: list[float]) -> None:
    window = Window(size=64, warmup=4)
    for v in values:
        window.add(loss=v, grad_norm=abs(v))
    state = window.state_dict()
    assert all(math.isfinite(v) for v in state["losses"] + state["norms"])
    limits = window.limits()
    assert not math.isnan(limits.grad_norm)


def test_one_outlier_does_not_widen_the_limits() -> None:
    window = Window(size=64, warmup=8)
    for i in range(64):
        window.add(loss=2.0 + 0.01 * (i % 5), grad_norm=1.0)
    before = window.limits()
    window.add(loss=1e9, grad_norm=1e9)
    assert window.limits().grad_norm == pytest.approx(before.grad_norm, rel=0.02)


def test_a_window_round_trips() -> None:
    a, b = Window(), Window()
    for i in range(100):
        a.add(loss=i, grad_norm=i + 1)
    b.load_state_dict(a.state_dict())
    assert b.state_dict() == a.state_dict()
    assert b.limits() == a.limits()


KINDS = ["nonfinite", "overflow", "spike", "forecast", "dead", "unmoved", "pending", "exception", "ok"]
LEVELS = [None, "input", "prediction", "loss", "gradient", "parameter", "buffer"]
POLICIES = {mode: Policy(mode=mode) for mode in ("protect", "stop", "observe")}  # type: ignore[arg-type]
ORIGINS = [None, "transient", "range", "data", "state", "scale"]


def everything() -> Any:
    for kind, level, origin, consecutive, rollbacks, restores, snapshot, checkpoint, mode in itertools.product(
        KINDS,
        LEVELS,
        ORIGINS,
        (0, 4, 5, 6),
        ((), (1,), (1, 2, 3)),
        (0, 1),
        (None, 3),
        (False, True),
        POLICIES,
    ):
        verdict = Verdict(kind=kind, step=10, level=level, origin=origin)  # type: ignore[arg-type]
        history = History(consecutive=consecutive, rollbacks=rollbacks, restores=restores)
        means = Recoveries(snapshot=snapshot, checkpoint=checkpoint)
        yield verdict, history, POLICIES[mode], means, decide(verdict, history, POLICIES[mode], means)


def test_what_the_policy_may_never_do() -> None:
    seen = set()
    for verdict, history, policy, means, action in everything():
        seen.add(action.kind)
        harmful = verdict.kind in ("nonfinite", "overflow")
        if verdict.ok or verdict.kind in ("forecast", "dead"):
            assert action.kind == "commit"
        if policy.mode == "observe":
            assert action.kind == "commit"
        if harmful and policy.mode == "protect":
            assert action.kind != "commit", "a harmful step is never carried out"
        if action.kind == "rollback":
            assert means.snapshot is not None
            assert len(history.rollbacks) < policy.max_rollbacks
        if action.kind == "restore":
            assert means.checkpoint
            assert history.restores < policy.max_restores
        if verdict.kind == "spike" and policy.mode == "protect":
            assert action.kind != "stop", "a finite run is never stopped"
            if verdict.origin == "state":
                assert action.kind in ("rollback", "commit"), "no batch is to blame for weights that diverge"
        if harmful and policy.mode == "protect" and verdict.origin == "state":
            assert action.kind != "skip", "skipping cannot heal a bad state"
        if not verdict.ok:
            assert action.reason
    assert seen == {"commit", "skip", "rerun", "rollback", "restore", "stop"}


def test_every_endless_failure_ends() -> None:
    """Whatever is bad for ever, the number of bad steps is bounded."""
    for origin, means in itertools.product(
        ORIGINS[2:5], (Recoveries(), Recoveries(snapshot=3), Recoveries(snapshot=3, checkpoint=True))
    ):
        policy, history = Policy(), History()
        for step in range(10_000):
            verdict = Verdict(kind="nonfinite", step=step, level="loss", origin=origin)  # type: ignore[arg-type]
            action = decide(verdict, history, policy, means)
            if action.kind == "stop":
                break
            history = history.after(action, step, policy)
        assert step <= 50, (origin, means)


def test_a_good_step_ends_a_streak_and_old_skips_are_forgotten() -> None:
    policy = Policy(per_steps=10)
    history = History(consecutive=3, skips=(1, 2, 50))
    after = history.after(Action(kind="commit"), 55, policy)
    assert (after.consecutive, after.skips) == (0, (50,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "relaxed"}, r"mode is 'relaxed'\. Next: use one of protect, stop, observe"),
        ({"max_consecutive": 0}, r"policy.max_consecutive is 0\. Next: give 1 or more"),
        ({"max_rollbacks": -1}, r"policy.max_rollbacks is -1\. Next: give 0 or more"),
        ({"lr_backoff": 1.5}, r"policy.lr_backoff is 1.5\. Next: give a factor above 0 and up to 1"),
        ({"min_scale": 0.0}, r"policy.min_scale is 0.0\. Next: give a positive number"),
        ({"spikes": "clip"}, r"spikes is 'clip'\. Next: use one of skip, observe"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Policy(**change)


def test_policies_by_name() -> None:
    assert Policy.named("strict") == Policy(mode="stop")
    assert Policy.strict(max_skips=3).max_skips == 3
    assert dataclasses.asdict(Policy.named("default")) == dataclasses.asdict(Policy())
    with pytest.raises(UsageError, match=r"policy is 'lenient'\. Next: use one of default, strict, observe"):
        Policy.named("lenient")


def test_infinite_limits_let_everything_finite_pass() -> None:
    assert judge(Reading(step=1, loss=1e30, grad_norm=1e30, lr=0), Limits()).ok
    assert judge(Reading(step=1, loss=-math.inf, grad_norm=1.0, lr=0), Limits()).kind == "nonfinite"
