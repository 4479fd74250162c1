"""What a trial is worth."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nanproof.cure.judge import Reference, horizon, judge, together
from nanproof.cure.metric import Metric, Wanted, find_metric
from nanproof.cure.trial import Ran

DEAD = Reference(best_loss=1.0, died_at=40, step_seconds=0.1, opening="a")


def ran(**changes: Any) -> Ran:
    told: dict[str, Any] = {
        "name": "lr/2",
        "slug": "lr-2",
        "seed": None,
        "horizon": None,
        "end": "finished",
        "exit_code": 0,
        "steps": 100,
        "died_at": None,
        "skipped": 0,
        "spikes": 0,
        "best_loss": 0.1,
        "loss": 0.1,
        "step_seconds": 0.1,
        "seconds": 10.0,
        "metric": Metric(name="accuracy", value=0.95, chance=0.1, target=0.9),
        "opening": "b",
    }
    return Ran(**{**told, **changes})


def accuracy(value: float, chance: float | None = 0.1, target: float | None = 0.9) -> Metric:
    return Metric(name="accuracy", value=value, chance=chance, target=target)


@pytest.mark.parametrize(
    ("changes", "standing"),
    [
        ({}, "cured"),
        ({"metric": accuracy(0.6)}, "alive, learning"),
        ({"metric": accuracy(0.13)}, "alive, not learning"),  # within the noise of a small evaluation
        ({"metric": accuracy(0.05)}, "alive, not learning"),
        ({"metric": accuracy(math.nan)}, "alive, not learning"),
        ({"metric": accuracy(0.95), "skipped": 20}, "alive, learning"),
        ({"metric": None}, "alive, learning"),  # the loss alone proves nothing
        ({"metric": None, "loss": 2.0}, "alive, not learning"),
        ({"metric": accuracy(0.95, chance=None, target=None)}, "alive, learning"),
        ({"metric": accuracy(0.95, target=None)}, "cured"),
        ({"metric": accuracy(0.95, target=None), "loss": 2.0}, "alive, learning"),
        ({"end": "died", "died_at": 60}, "died"),
        ({"end": "died", "died_at": 40, "opening": "a"}, "inert"),
        ({"end": "stopped", "died_at": 60}, "died"),
        ({"end": "failed", "exit_code": 2, "steps": 0, "said": "unrecognized arguments"}, "failed"),
        ({"end": "horizon"}, "alive so far"),
        ({"end": "cut"}, "cut"),
    ],
)
def test_standing(changes: dict[str, Any], standing: str) -> None:
    assert judge(ran(**changes), DEAD).standing == standing


def test_a_cure_must_hold_on_every_seed() -> None:
    verdicts = [judge(ran(), DEAD), judge(ran(metric=accuracy(0.05)), DEAD), judge(ran(), DEAD)]
    assert together(verdicts).standing == "alive, not learning"
    assert together(verdicts[:1]).standing == "cured"


def test_the_horizon_reaches_far_beyond_the_death() -> None:
    assert horizon(died_at=81, schedule=1000) == 350
    assert horizon(died_at=300, schedule=1000) == 600
    assert horizon(died_at=60, schedule=70) is None  # the rest is not worth a second run
    assert horizon(died_at=None, schedule=None) is None


@pytest.mark.parametrize(
    ("text", "wanted", "value", "chance", "target"),
    [
        ("step 1 acc 0.3\ndone: top-1 accuracy 0.91 (chance 0.10, target 0.9)", Wanted(), 0.91, 0.1, 0.9),
        ("accuracy: 0.4 (chance 0.1)\naccuracy: 0.5 (chance 0.1)", Wanted(), 0.5, 0.1, None),
        ("val_acc=0.71\nval_acc=0.82\n", Wanted(), 0.82, None, None),
        ('{"eval_em": 0.5, "step": 3}', Wanted(name="eval_em", chance=0.0, target=0.4), 0.5, 0.0, 0.4),
    ],
)
def test_the_last_value_of_the_metric(
    text: str, wanted: Wanted, value: float, chance: float | None, target: float | None
) -> None:
    found = find_metric(text, wanted)
    assert found is not None
    assert (found.value, found.chance, found.target) == (value, chance, target)


def test_metrics_of_which_less_is_better() -> None:
    found = find_metric("perplexity 12.0 (chance 100, target 20)")
    assert found is not None
    assert found.lower
    assert found.above_chance
    assert found.at_target
    assert find_metric("nothing is measured here") is None
