"""The story of a run: what went wrong first, what came before, how long it went on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from logs.reading import NAN, read_text
from nanproof.logs import Series
from nanproof.logs.collect import Collector
from nanproof.logs.foresee import foresee
from nanproof.logs.timeline import Timeline, timeline


def series_of(steps: Any, **columns: Any) -> Series:
    """A log with these columns; None where a column has no value."""
    collector = Collector(source="run", format="test")
    steps = list(steps)
    for i, step in enumerate(steps):
        row = {n: (c[i] if isinstance(c, list | np.ndarray) else c) for n, c in columns.items()}
        collector.record({"step": step, **{k: float(v) for k, v in row.items() if v is not None}})
    return collector.series()


def story_of(steps: Any, **columns: Any) -> Timeline:
    return timeline(series_of(steps, **columns))


def noise(count: int, level: float = 2.0, spread: float = 0.02, seed: int = 0) -> np.ndarray[Any, Any]:
    return level + spread * np.random.default_rng(seed).standard_normal(count)


def falling(count: int, start: float = 4.0, end: float = 2.0) -> np.ndarray[Any, Any]:
    return end + (start - end) * np.exp(-np.arange(count) / (count / 4)) + noise(count, 0.0)


def test_a_healthy_run_has_no_story() -> None:
    rate = np.concatenate([np.linspace(0, 1e-3, 100), 1e-3 * 0.5 * (1 + np.cos(np.linspace(0, math.pi, 900)))])
    story = story_of(range(1000), loss=falling(1000), grad_norm=noise(1000, 1.0, 0.1), lr=rate, eval_loss=falling(1000))
    assert story.outcome == "healthy"
    assert story.first is None
    assert story.moments == ()
    assert (story.first_step, story.last_step) == (0, 999)


def test_an_empty_log() -> None:
    story = timeline(Collector(source="", format="").series())
    assert (story.outcome, story.first, story.dead, story.moments) == ("empty", None, None, ())


def test_the_dead_phase_of_a_resumed_run() -> None:
    loss = [*falling(101), *noise(20), *([NAN] * 979)]
    steps = [*range(0, 93_000, 923), *range(92_261, 92_261 + 999 * 100, 100)]
    story = story_of(steps, loss=loss)
    assert story.outcome == "dead"
    assert story.dead is not None
    assert story.dead.numbers["steps"] == 97_900
    assert "(98 % of the steps since the resume at 92,261)" in story.dead.text
    assert story.first is not None
    assert story.first.kind == "nonfinite"
    assert story.first.step == 92_261 + 2_000


def test_which_part_went_first() -> None:
    bad = [1.0] * 50 + [NAN] * 50
    story = story_of(
        range(100),
        loss=[2.0] * 51 + [NAN] * 49,
        loss_cls=bad,
        loss_box=[1.0] * 51 + [NAN] * 49,
        grad_norm=[1.0] * 51 + [math.inf] + [NAN] * 48,
    )
    assert story.order == ("loss_cls", "loss_box", "loss", "grad_norm")
    assert story.first is not None
    assert story.first.column == "loss_cls"
    assert all(m.kind != "nonfinite" for m in story.before)
    assert story.first.text == "loss_cls is NaN since step 50; the last finite value was 1 at step 49"


def test_nan_at_single_steps_is_intermittent_not_dead() -> None:
    loss = noise(200)
    loss[[30, 90, 150]] = NAN
    story = story_of(range(200), loss=loss)
    assert story.outcome == "intermittent"
    assert story.dead is None
    assert story.first is not None
    assert story.first.text.startswith("loss is NaN at 3 points (steps 30, 90, 150) and finite between")
    mixed = [NAN if i == 30 else math.inf if i == 90 else 1.0 for i in range(200)]
    both = story_of(range(200), loss=mixed).first
    assert both is not None
    assert both.text.startswith("loss is not finite at 2 points (steps 30, 90)")


def test_bad_before_any_update_and_at_a_rate_of_zero() -> None:
    collector = Collector(source="", format="")
    collector.record({"step": 0, "eval_loss": "NaN"})
    for step in range(1, 10):
        collector.record({"step": step, "loss": "NaN", "lr": 0.0})
    story = timeline(collector.series())
    texts = [m.text for m in story.of("nonfinite")]
    assert "eval_loss is NaN since step 0; it was never finite before, before any update" in texts
    assert any(
        t.startswith("loss is NaN since step 1; it was never finite before; the learning rate was 0") for t in texts
    )


def test_the_trainers_filter() -> None:
    story = story_of(range(1, 51), loss=[*noise(5), *([0.0] * 45)], grad_norm=[1.0] * 5 + [NAN] * 45)
    (hidden,) = story.of("hidden-nan")
    assert (hidden.step, hidden.until) == (6, 50)
    assert "45 points" in hidden.text
    assert story.outcome == "dead"
    assert not story.of("masked-loss", "flat")


def test_labels_that_are_all_masked() -> None:
    story = story_of(range(30), loss=[0.0] * 30, grad_norm=[0.0] * 30)
    assert story.outcome == "useless"
    assert story.of("masked-loss")[0].step == 0


def test_zero_is_normal_where_gradients_flow() -> None:
    story = story_of(range(30), loss=[0.0] * 30, grad_norm=noise(30, 0.2), reward=noise(30))
    assert story.outcome == "healthy"


def test_zeros_without_a_norm() -> None:
    story = story_of(range(30), loss=[*noise(10), *([0.0] * 20)])
    assert story.of("zero-loss")[0].step == 10
    assert story.outcome == "dead"


@pytest.mark.parametrize(("classes", "kind"), [(2, "chance"), (1000, "chance"), (None, "flat")])
def test_a_flat_loss(classes: int | None, kind: str) -> None:
    level = math.log(classes) if classes else 3.21
    story = story_of(range(300), loss=noise(300, level, 0.002))
    assert story.outcome == "useless"
    assert [m.kind for m in story.moments] == [kind]
    assert ("level of chance" in story.moments[0].text) == (kind == "chance")


def test_a_loss_that_falls_is_not_flat() -> None:
    assert not story_of(range(100), loss=falling(100, 2.2, 2.0)).of("flat", "chance")


def test_a_spike_that_recovers_is_benign_and_its_gradients_led() -> None:
    loss, norm = falling(400, 2.4, 2.0), noise(400, 1.0, 0.05)
    loss[200:206] = [3.0, 5.0, 4.0, 3.5, 2.5, 2.2]
    norm[198:203] = [20.0, 40.0, 15.0, 12.0, 11.0]
    story = story_of(range(400), loss=loss, grad_norm=norm)
    (spike,) = [m for m in story.of("spike") if m.column == "loss"]
    assert spike.benign
    assert spike.numbers["peak"] == 5.0
    assert 203 <= spike.numbers["recovered"] <= 208
    assert spike.numbers["lead"] == 2
    assert "grad_norm leapt 2 steps earlier" in spike.text
    assert story.outcome == "healthy"
    assert story.first is None


def test_a_spike_that_stays() -> None:
    story = story_of(range(400), loss=[*noise(200), *noise(200, 2.8, seed=1)])
    (spike,) = story.of("spike")
    assert not spike.benign
    assert story.before == ()
    assert spike.numbers["level"] == pytest.approx(2.8, abs=0.05)
    assert "does not come back" in spike.text
    assert story.first is spike


def test_noise_is_no_spike() -> None:
    rng = np.random.default_rng(1)
    story = story_of(
        range(5000), loss=2 + 0.3 * rng.standard_normal(5000), grad_norm=np.exp(0.4 * rng.standard_normal(5000))
    )
    assert story.of("spike") == ()


def test_growth_before_the_end() -> None:
    grown = [*noise(60), *np.geomspace(2, 300, 12), *([NAN] * 5)]
    story = story_of(
        range(len(grown)), loss=grown, grad_norm=[*noise(60, 1.0), *np.geomspace(1, 1e5, 12), *([NAN] * 5)]
    )
    growth = {m.column: m for m in story.of("growth")}
    assert set(growth) == {"loss", "grad_norm"}
    assert growth["loss"].numbers["ratio"] > 100
    sudden = story_of(range(65), loss=[*noise(60), *([NAN] * 5)])
    assert not sudden.of("growth")


def test_a_loss_that_turns_round() -> None:
    loss = np.concatenate([np.linspace(4, 2, 300), np.linspace(2, 3.5, 300)]) + noise(600, 0.0)
    story = story_of(range(600), loss=loss)
    (turn,) = story.of("divergence")
    assert 250 < turn.step < 350
    assert story.outcome == "useless"


def test_a_loss_below_zero() -> None:
    story = story_of(
        range(40), loss=[*np.linspace(1, 0.1, 20), *np.linspace(-0.1, -9, 20)], policy_loss=noise(40, -1.0)
    )
    assert [(m.column, m.step) for m in story.of("negative-loss")] == [("loss", 20)]


def cosine(count: int) -> np.ndarray[Any, Any]:
    return 1e-3 * 0.5 * (1 + np.cos(np.linspace(0, 3, count)))


def test_a_jump_of_the_rate_at_a_resume() -> None:
    rate = [*cosine(100)[:60], *([5e-3] * 40)]
    story = story_of([*range(60), *range(50, 90)], loss=noise(100), lr=rate)
    (jump,) = story.of("lr-jump")
    assert jump.step == 50
    assert jump.text.endswith("at a resume")
    assert not jump.benign
    (resume,) = story.of("resume")
    assert "steps go back from 59 to 50" in resume.text
    assert resume.numbers["lr_after"] == 5e-3


def test_schedules_do_not_jump() -> None:
    warm = [*np.linspace(0, 1e-3, 50), *cosine(950)]
    linear = [*np.linspace(1e-5, 1e-3, 100), *np.linspace(1e-3, 0, 900)]
    for rate in (warm, linear, [1e-4] * 1000):
        assert not story_of(range(1000), loss=noise(1000), lr=rate).of("lr-jump", "lr-frozen")
    printed = np.round(cosine(1000), 6)  # by the end it moves by whole digits, now and then
    assert not story_of(range(1000), loss=noise(1000), lr=printed).of("lr-jump", "lr-frozen")
    decay = story_of(range(900), loss=falling(900), lr=[0.1] * 300 + [0.01] * 300 + [0.001] * 300)
    assert [(m.step, m.benign) for m in decay.of("lr-jump")] == [(300, True), (600, True)]


def test_a_rate_that_stands_still_means_skipped_steps() -> None:
    steady = np.linspace(1e-3, 5e-4, 97)
    rate = [*steady[:41], *([steady[40]] * 3), *steady[41:]]  # it continues from where it stood
    story = story_of(range(100), loss=noise(100), lr=rate)
    (frozen,) = story.of("lr-frozen")
    assert (frozen.step, frozen.until) == (40, 43)
    constant_at_end = np.concatenate([np.linspace(1e-3, 1e-5, 50), [1e-5] * 50])
    assert not story_of(range(100), loss=noise(100), lr=constant_at_end).of("lr-frozen")
    dead = np.concatenate([np.linspace(1e-3, 5e-4, 50), [5e-4] * 50])
    stuck = story_of(range(100), loss=[*noise(50), *([0.0] * 50)], grad_norm=[1.0] * 50 + [NAN] * 50, lr=dead)
    assert stuck.of("lr-frozen")[0].until == 99
    warm = [*np.linspace(1e-5, 1e-3, 40), *([1e-3] * 60)]  # constant by plan; the gradients go bad much later
    assert not story_of(range(100), loss=noise(100), grad_norm=[1.0] * 90 + [NAN] * 10, lr=warm).of("lr-frozen")
    printed = np.round(np.linspace(6e-5, 5e-5, 1000), 7)  # three digits: it moves every tenth line only
    assert not story_of(range(1000), loss=noise(1000), lr=printed).of("lr-frozen")


def test_the_search_of_the_scaler_is_benign() -> None:
    scale = [2.0 ** (32 - i) for i in range(16)] + [2.0**17] * 984
    story = story_of(range(1000), loss=falling(1000), loss_scale=scale)
    assert [(m.kind, m.benign) for m in story.moments] == [("scale-search", True)]
    assert story.outcome == "healthy"


def test_single_halvings_are_benign_a_collapse_is_not() -> None:
    steady = np.full(1000, 65536.0)
    steady[400:600] = 32768.0
    (fall,) = story_of(range(1000), loss=falling(1000), loss_scale=steady).of("scale-fall")
    assert fall.benign
    collapsing = [65536.0] * 800 + [65536.0 / 2**i for i in range(1, 18)] + [0.5] * 50
    story = story_of(range(len(collapsing)), loss=falling(len(collapsing)), loss_scale=collapsing)
    (collapse,) = story.of("scale-collapse")
    assert (collapse.step, collapse.numbers["lowest"]) == (800, 0.5)
    assert story.first is collapse


def test_skipped_steps_by_count_and_by_words() -> None:
    (running,) = story_of(range(50), loss=falling(50), skipped=[0] * 20 + [3] * 10 + [5] * 20).of("skipped")
    assert (running.value, running.step, running.until) == (5, 20, 30)
    story = story_of(
        range(50),
        loss=falling(50),
        **{"number of skipped iterations": [0, 1] * 25, "number of nan iterations": [0] * 49 + [2]},
    )
    assert story.of("skipped")[0].value == 25
    assert story.of("nan-iterations")[0].step == 49
    assert story.outcome == "intermittent"
    words = "".join(
        f"iter {i}: loss {3 - i / 20}\nGradient overflow.  Skipping step, reducing loss scale to 32768.0\n"
        for i in range(9)
    )
    (overflow,) = timeline(read_text(words)).of("overflow")
    assert overflow.text == "the log reports 9 overflows (steps 0 to 8)"
    assert overflow.line == 2


def test_words_in_the_story() -> None:
    story = timeline(
        read_text(
            "Resuming from checkpoint ckpt/step_500 at iteration 500\nstep 510: loss 2.0\nstep 520: loss 2.1\n"
            "FutureWarning: Non-finite norm encountered in torch.nn.utils.clip_grad_norm_; continuing anyway\n"
            'step 530: loss 2.1\nTraceback (most recent call last):\n  File "a.py", line 3, in f\n    x()\n'
            "RuntimeError: Function 'SqrtBackward0' returned nan values in its 0th output.\n"
        )
    )
    assert story.outcome == "stopped"
    assert [(m.kind, m.name, m.step) for m in story.moments] == [
        ("resume", "", 500),
        ("warning", "norm-nonfinite", 520),
        ("exception", "anomaly", 530),
    ]


def test_a_metric_alone_does_not_hurt() -> None:
    story = story_of(range(60), loss=falling(60), grad_norm=noise(60, 1.0), logits=[NAN] * 60)
    assert story.outcome == "healthy"
    assert story.order == ("logits",)


def test_an_unknown_value_beside_parts_of_a_loss_may_be_their_sum() -> None:
    parts = {"cls_loss": falling(60), "box_loss": falling(60)}
    assert story_of(range(60), **parts).outcome == "healthy"
    assert story_of(range(60), **parts, total=[NAN] * 60).outcome == "intermittent"


@pytest.mark.parametrize("name", ["nan_params", "num_nan_grads", "n_nonfinite", "inf_count"])
def test_a_log_that_counts_bad_values_itself(name: str) -> None:
    assert story_of(range(60), loss=falling(60), **{name: [0] * 60}).outcome == "healthy"
    story = story_of(range(60), loss=falling(60), **{name: [0] * 40 + [12] * 20})
    assert story.outcome == "intermittent"
    assert story.first is not None
    assert story.first.text == f"{name} is above 0 at 20 points (steps 40 to 59)"


def test_a_loss_that_is_left_out_while_the_rest_goes_on() -> None:
    loss = [*falling(100), *[None] * 50]
    story = story_of(range(150), loss=loss, lr=1e-4)
    assert story.outcome == "useless"
    assert story.first is not None
    assert story.first.text.startswith("loss ends at step 99, lr goes on to step 149")
    # a tail of evaluation, and a loss that is written more rarely than the rate
    rows = series_of(range(150), loss=loss, lr=[*[1e-4] * 100, *[None] * 50], eval_loss=falling(150))
    assert timeline(rows).outcome == "healthy"
    rare = [v if i % 20 == 0 else None for i, v in enumerate(falling(150))]
    assert story_of(range(150), loss=rare, lr=1e-4).outcome == "healthy"


def test_units_in_sentences() -> None:
    epochs = timeline(read_text("epoch 1 loss: 0.7\nepoch 2 loss: 0.6\nepoch 3 loss: nan\n"))
    assert epochs.first is not None
    assert epochs.first.text == "loss is NaN since epoch 3; the last finite value was 0.6 at epoch 2"
    rows = timeline(read_text("{'loss': 2.0, 'epoch': 0.1}\n{'loss': nan, 'epoch': 0.2}\n"))
    assert rows.first is not None
    assert "since row 2" in rows.first.text


def test_hours_that_were_wasted() -> None:
    collector = Collector(source="", format="")
    for step in range(100):
        collector.record(
            {
                "step": step,
                "loss": 1.0 if step < 20 else "NaN",
                "_timestamp": 1.7e9 + 360 * step - (1e6 if step == 50 else 0),
            }
        )
    dead = timeline(collector.series()).dead
    assert dead is not None
    assert dead.numbers["seconds"] > 3600
    assert "hours" in dead.text


def test_a_forecast_of_rows_that_share_a_step() -> None:
    """Scalers print one line for each overflow before the first step: the forecast must not need two steps."""
    line = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to"
    series = read_text("".join(f"{line} {2.0**-i}\n" for i in range(60)))
    assert series.loss_scale is not None
    assert foresee(series).risk >= 0
