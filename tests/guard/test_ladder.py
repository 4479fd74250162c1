"""Each rung of the ladder, reached by the fault it is there for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanproof import Guard, Policy
from nanproof.errors import GuardStop
from support.runs import loss_of, make_batches, make_run, seed_everything, with_faults


def bad(kind: str = "nan") -> Any:
    return with_faults(make_batches(2, seed=9), {0: kind})[0]


def test_transient_a_rerun_that_is_clean_is_kept() -> None:
    """As a flipped bit would: the same step fails once, and the run goes on as if it had not."""
    batches = make_batches(12)
    reference = make_run()
    reference.feed(batches)
    run = make_run()
    run.feed(batches[:6])
    calls = 0

    def once() -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = loss_of(run.model, batches[6])
        return loss * float("nan") if calls == 1 else loss

    verdict = run.guard.step(once)
    assert (verdict.kind, verdict.origin) == ("nonfinite", "transient")
    assert run.guard.tally.actions["rerun"] == 1
    run.feed(batches[7:])
    assert run.digest() == reference.digest()


def test_a_closure_that_fetches_its_own_batch_sees_the_same_one_again() -> None:
    """Running a step again must not use up the loader, nor judge another batch."""
    batches = make_batches(12)
    reference = make_run()
    reference.feed(batches)
    run = make_run()
    loader = run.guard.batches(with_faults(batches, {6: "nan"}))
    verdicts = [run.guard.step(lambda: loss_of(run.model, next(loader))) for _ in range(13)]
    assert [v.ok for v in verdicts].count(False) == 1
    assert verdicts[6].origin == "data"
    assert run.digest() == reference.digest()


def test_range_finite_in_float32() -> None:
    """A product that leaves float16 and is harmless in float32."""
    seed_everything()
    model = nn.Linear(8, 4)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))
    x = make_batches(1)[0].x

    def half(scale: float) -> Any:
        def run() -> torch.Tensor:
            with torch.autocast("cpu", torch.float16):
                return (model(x * scale) * 10.0).float().square().mean() * 1e-8

        return run

    assert guard.step(half(1.0)).ok
    verdict = guard.step(half(50_000.0))
    assert (verdict.kind, verdict.origin) == ("nonfinite", "range")


def test_range_of_a_model_in_pure_half_precision() -> None:
    seed_everything()
    model = nn.Linear(8, 4).to(torch.float16)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))
    x = make_batches(1)[0].x.half()
    before = [p.detach().clone() for p in model.parameters()]
    verdict = guard.step(lambda: (model(x * 10_000) * 10_000).float().mean() * 1e-9)
    assert verdict.origin == "range"
    assert all(p.dtype == torch.float16 for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_data_bad_from_an_older_state_too() -> None:
    run = make_run(snapshot_every=5)
    run.feed(make_batches(12))
    verdict = run.guard.step(lambda: loss_of(run.model, bad()))
    assert (verdict.origin, run.guard.tally.actions["skip"]) == ("data", 1)


def test_state_good_from_an_older_state_rolls_back_at_once() -> None:
    run = make_run(snapshot_every=5)
    run.feed(make_batches(12))
    with torch.no_grad():
        run.model.last.weight.mul_(1e38)  # finite, but every forward pass overflows from here on
    batch = make_batches(1)[0]
    verdict = run.guard.step(lambda: loss_of(run.model, batch))
    assert verdict.origin == "state"
    assert run.guard.tally.actions["rollback"] == 1
    assert run.guard.tally.updates == 10
    assert run.guard.step(lambda: loss_of(run.model, batch)).ok


def test_consecutive_skips_give_way_to_a_rollback_with_a_lower_rate() -> None:
    run = make_run(snapshot_every=5, policy=Policy(max_consecutive=3, lr_backoff=0.5, lr_recovery=4))
    batches = make_batches(30)
    run.feed(batches[:12])
    before = run.digest()
    run.feed([bad()] * 4)
    actions = run.guard.tally.actions
    assert (actions["skip"], actions["rollback"]) == (3, 1)
    assert run.digest() == before, "the first rollback goes to where the streak began: no update is lost"
    assert (run.guard.tally.updates, run.guard.tally.undone) == (12, 0)
    assert run.guard._engine.backoff.factor == 0.5
    lr = run.optimizer.param_groups[0]["lr"]
    run.feed(batches[12:20])
    assert run.guard._engine.backoff.factor == 1.0
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(lr * 0.99**8), "the schedule itself is not disturbed"


def test_a_second_rollback_goes_further_back_then_the_run_stops() -> None:
    run = make_run(snapshot_every=5, policy=Policy(max_consecutive=2))
    run.feed(make_batches(12))
    with pytest.raises(GuardStop, match=r"2 bad steps in a row after 3 rollbacks.*Next: nanproof diagnose") as stop:
        run.feed([bad()] * 20)
    assert stop.value.exit_code == 66
    tally = run.guard.tally
    assert tally.actions["rollback"] == 3
    assert (tally.updates, tally.undone) == (5, 7)
    assert tally.steps == tally.updates + tally.undone + sum(tally.actions[k] for k in ("skip", "rollback", "stop"))
    for call in (
        lambda: run.guard.step(lambda: loss_of(run.model, make_batches(1)[0])),
        lambda: run.guard.backward(loss_of(run.model, make_batches(1)[0])),
        lambda: run.guard.epoch(),
    ):
        with pytest.raises(GuardStop) as again:
            call()
        assert again.value is stop.value
    assert not isinstance(stop.value, Exception), "except Exception cannot swallow it"


def test_a_checkpoint_is_restored_before_the_run_stops(tmp_path: Path) -> None:
    run = make_run(snapshot_every=None, policy=Policy(max_consecutive=2))
    batches = make_batches(12)
    run.feed(batches[:6])
    run.guard.save(tmp_path / "six.pt")
    saved = run.digest()
    run.feed(batches[6:])
    run.feed([bad()] * 3)
    assert run.guard.tally.actions["restore"] == 1
    assert run.guard.tally.updates == 6
    assert run.digest() == saved
    with pytest.raises(GuardStop, match=r"after 1 restore.*the last good checkpoint is .*six\.pt"):
        run.feed([bad()] * 20)


def test_too_many_scattered_skips_are_a_reason_too() -> None:
    run = make_run(snapshot_every=5, policy=Policy(max_skips=3, per_steps=100))
    for good in make_batches(8):
        run.feed([good, bad()])
        if run.guard.tally.actions["rollback"]:
            break
    assert run.guard.tally.actions["skip"] == 3


def test_strict_stops_at_the_first_bad_step_with_the_state_before_it() -> None:
    run = make_run(policy="strict")
    batches = make_batches(8)
    run.feed(batches)
    before = run.digest()
    with pytest.raises(GuardStop, match=r"step 9: nonfinite loss nan.*stops at the first bad step"):
        run.feed([bad()])
    assert run.digest() == before


def test_observe_only_records() -> None:
    run = make_run(policy="observe")
    verdicts = run.feed([*make_batches(4), bad()])
    assert verdicts[-1] == "nonfinite"
    assert any(torch.isnan(p).any() for p in run.model.parameters())


def test_bad_parameters_are_found_on_the_cadence_and_rolled_back() -> None:
    for target in ("buffer", "moment"):
        run = make_run(snapshot_every=4, with_ema=False)
        batches = make_batches(30)
        run.feed(batches[:6])
        with torch.no_grad():
            if target == "buffer":
                run.model.norm.running_var[0] = float("inf")
            else:
                run.optimizer.state[run.model.last.weight]["exp_avg_sq"][0, 0] = float("nan")
        run.feed(batches[6:20])
        assert run.guard.tally.actions["rollback"] >= 1, target
        assert not run.guard.training.nonfinite(), target


def test_a_snapshot_of_a_bad_state_never_pushes_out_a_good_one() -> None:
    run = make_run(snapshot_every=2, with_ema=False, policy="observe")
    run.feed(make_batches(4))
    with torch.no_grad():
        run.model.last.weight[0, 0] = float("nan")
    run.feed(make_batches(8))
    healthy = run.guard._context.snapshots.healthy()
    assert [s.update for s in healthy] == [4]


def test_epoch_looks_at_everything_now() -> None:
    run = make_run(snapshot_every=5)
    run.feed(make_batches(6))
    assert run.guard.epoch().ok
    with torch.no_grad():
        run.model.norm.running_mean[2] = float("nan")
    verdict = run.guard.epoch()
    assert (verdict.kind, verdict.level, verdict.names[0]) == ("nonfinite", "buffer", "norm.running_mean")
    assert run.guard.epoch().ok, "rolled back"


def test_a_persistent_finite_change_is_accepted_not_fatal() -> None:
    """A new level of the gradients looks like spikes; a healthy run must not be stopped for it."""
    run = make_run(policy=Policy(max_consecutive=3, max_rollbacks=1), snapshot_every=5)
    batches = make_batches(60)
    run.feed(batches[:20])
    verdicts = [run.guard.step(lambda b=b: 1000.0 * loss_of(run.model, b)).kind for b in batches[20:]]
    assert "spike" in verdicts
    assert verdicts[-10:] == ["ok"] * 10


def test_ninety_eight_thousand_dead_steps_cannot_happen() -> None:
    """The first system's post-mortem: NaN from one step on, for ever, and nobody stopped it."""
    run = make_run(snapshot_every=5)
    run.feed(make_batches(12))
    with pytest.raises(GuardStop):
        run.feed([bad()] * 98_000)
    assert run.guard.tally.steps < 100
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_an_overflowing_norm_of_finite_gradients_is_told_apart() -> None:
    seed_everything()
    model = nn.Linear(4, 4)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=1.0, policy=Policy(rerun=False))
    before = model.weight.detach().clone()
    verdict = guard.step(lambda: (model(torch.ones(1, 4)) * 1e25).sum())
    assert verdict.kind == "overflow"
    assert verdict.value == pytest.approx(1e25 * (4 * 4 + 4) ** 0.5, rel=1e-3)
    assert torch.equal(model.weight, before)


class Shared(torch.optim.Optimizer):
    """Keeps numbers for all parameters together, as MADGRAD and SPAM do, and an option that is infinite by default."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "growth_rate": float("inf")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        state: Any = self.state
        if "k" not in state:
            state["k"], state["n"], state["seen"] = torch.zeros(1), 0, {"times": 0}
        state["k"] += 1
        state["n"] += 1
        state["seen"]["times"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] / state["k"].item() * p.grad


def test_what_an_optimizer_keeps_for_all_parameters_is_rolled_back_too() -> None:
    def train(faults: int) -> tuple[Any, ...]:
        seed_everything()
        model = nn.Linear(8, 4)
        optimizer = Shared(model.parameters())
        # no back-off: both runs make the same updates
        guard = Guard(model, optimizer, policy=Policy(max_consecutive=2, lr_backoff=1.0))
        batches = make_batches(12)
        for i, batch in enumerate(batches):
            for bad in [True] * (faults if i == 6 else 0) + [False]:
                guard.step(lambda batch=batch, bad=bad: loss_of(model, batch) * (float("nan") if bad else 1.0))
        assert guard.tally.actions["rollback"] == (faults > 2)
        state: Any = optimizer.state
        return state["k"].item(), state["n"], state["seen"], [p.tolist() for p in model.parameters()]

    clean = train(0)
    assert clean[:3] == (12, 12, {"times": 12})
    assert train(1) == clean
    assert train(3) == clean
