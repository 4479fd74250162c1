"""Mixed precision: the scale is GradScaler's business, a NaN is ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nanproof import Guard, Policy
from support.runs import Net, digest, guarded, loss_of, make_batches, seed_everything, with_faults


def make(init_scale: float = 2.0**10, **options: Any) -> tuple[nn.Module, Any, Any, Guard]:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=5)
    return model, optimizer, scaler, guarded(model, optimizer, scaler=scaler, max_norm=1.0, spike_window=16, **options)


def closure(model: nn.Module, batch: Any) -> Any:
    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return loss_of(model, batch)

    return run


def plain_scaler_loop(batches: list[Any], init_scale: float) -> str:
    """The loop that the guard replaces, as torch's documentation has it."""
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=5)
    for b in batches:
        scaler.scale(closure(model, b)()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return digest(model, [optimizer], scaler)


def test_a_nan_holds_the_scale_and_everything_else() -> None:
    clean = make_batches(14)

    def train(batches: list[Any]) -> tuple[str, list[str]]:
        model, optimizer, scaler, guard = make()
        verdicts = [guard.step(closure(model, b)).kind for b in batches]
        return digest(model, [optimizer], scaler), verdicts

    reference, _ = train(clean)
    for kind in ("nan", "+inf", "grad:nan", "grad:+inf"):
        state, verdicts = train(with_faults(clean, {9: kind}))
        assert verdicts[9] == "nonfinite", kind
        assert state == reference, kind


def test_a_healthy_run_equals_the_plain_scaler_loop_overflows_included() -> None:
    """An ordinary overflow is not an incident: the scale backs off exactly as without the guard."""
    batches = make_batches(30)
    model, optimizer, scaler, guard = make(init_scale=2.0**24)
    for b in batches:
        guard.step(closure(model, b))
    guarded = digest(model, [optimizer], scaler)
    assert guard.tally.overflows > 0
    assert guard.tally.actions["skip"] == guard.tally.overflows
    assert not [k for k in guard.tally.kinds if "scale" not in k]

    assert guarded == plain_scaler_loop(batches, 2.0**24)


def test_an_ordinary_overflow_writes_no_incident(tmp_path: Any) -> None:
    model, _, _, guard = make(init_scale=2.0**24, run_dir=tmp_path)
    for b in make_batches(20):
        guard.step(closure(model, b))
    assert guard.tally.overflows > 0
    assert not (tmp_path / "incidents").exists()


@pytest.mark.slow
def test_100_bad_steps_in_a_row_then_clean_data_trains_on() -> None:
    for with_closure in (True, False):
        patient = Policy(max_consecutive=10_000, max_skips=10_000)
        model, _, scaler, guard = make(policy=patient, snapshot_every=None)
        batches = make_batches(40)
        bad = with_faults(batches[:1], {0: "grad:nan"})[0]

        def step(b: Any, model: Any = model, guard: Guard = guard, with_closure: bool = with_closure) -> None:
            if with_closure:
                guard.step(closure(model, b))
            else:
                guard.backward(closure(model, b)())
                guard.step()

        for b in batches[:20]:
            step(b)
        before = guard.tally.updates
        for _ in range(100):
            step(bad)
        assert guard.tally.updates == before
        assert scaler.get_scale() >= 1.0
        for b in batches[20:]:
            step(b)
        assert guard.tally.updates >= before + 19
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_bare_scaler_loop_dies_of_it() -> None:
    """The suite's own check: 500 bad steps underflow the scale, and the next clean step writes NaN."""
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    batches = make_batches(3)
    bad = with_faults(batches[:1], {0: "grad:nan"})[0]
    for b in [bad] * 500 + batches:
        scaler.scale(closure(model, b)()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 0.0


def test_bf16_without_scaler_works_the_same() -> None:
    clean = make_batches(14)

    def train(batches: list[Any]) -> str:
        seed_everything()
        model = Net().to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guard = guarded(model, optimizer, max_norm=1.0, spike_window=16)
        for b in batches:
            guard.step(lambda b=b: loss_of(model, type(b)(b.x.bfloat16(), b.y, b.fault)))
        return digest(model, [optimizer])

    reference = train(clean)
    for kind in ("nan", "+inf", "grad:nan", "spike"):
        assert train(with_faults(clean, {9: kind})) == reference, kind


def test_judged_norms_do_not_depend_on_the_scale() -> None:
    norms = []
    for scale in (2.0**4, 2.0**10):
        model, _, _, guard = make(init_scale=scale)
        guard.step(closure(model, make_batches(1)[0]))
        norms.append(guard._context.run.recorder.recent[-1].grad_norm)
    assert abs(norms[0] / norms[1] - 1) < 1e-2


def test_observing_leaves_a_scaler_loop_as_it_is() -> None:
    """Policy.observe vetoes nothing; GradScaler still has its own say, as in the plain loop."""
    batches = with_faults(make_batches(14), {9: "grad:nan", 11: "nan"})
    model, optimizer, scaler, guard = make(policy="observe")
    for b in batches:
        guard.step(closure(model, b))
    observed = digest(model, [optimizer], scaler)
    assert guard.tally.kinds.total() == 2

    assert observed == plain_scaler_loop(batches, 2.0**10)


def test_a_dropped_microbatch_under_a_scaler() -> None:
    clean = make_batches(12)

    def train(batches: list[Any], last: int) -> str:
        model, optimizer, scaler, guard = make(accumulate=3, on_bad_microbatch="microbatch")
        for b in batches[:-last]:
            guard.step(closure(model, b))
        for b in batches[-last:]:
            guard.step(closure(model, b))
        guard.flush()
        return digest(model, [optimizer], scaler)

    for kind in ("nan", "grad:nan", "grad:+inf"):
        bad = with_faults(clean, {10: kind})[10]
        assert train([*clean[:10], bad, clean[10]], 3) == train(clean[:11], 2), kind
