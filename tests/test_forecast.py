"""The forecast by itself: what it says of curves whose future is known."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanproof.forecast import CALM, CRITICAL, WARN, EarlyWarning, Forecast

HALF = 65504.0


def warnings(values: Iterable[float], name: str = "absmax/block", limit: float | None = HALF) -> list[EarlyWarning]:
    forecast = Forecast()
    limits = {name: limit} if limit is not None else {}
    found = [forecast.read(step, {name: v}, limits) for step, v in enumerate(values)]
    return [w for w in found if w is not None]


def noisy(level: float, n: int, seed: int = 0, spread: float = 0.5) -> list[float]:
    source = random.Random(seed)
    return [level * math.exp(spread * source.gauss(0, 1)) for _ in range(n)]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "absmax/block"])
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_trend(name: str, seed: int) -> None:
    assert warnings(noisy(3.0, 2000, seed), name, None) == []


@pytest.mark.parametrize("rate", [1.08, 1.19, 1.4])
def test_growth_is_announced_with_the_step_at_which_it_ends(rate: float) -> None:
    grown = [v * rate ** max(0, i - 100) for i, v in enumerate(noisy(20.0, 400, spread=0.05))]
    death = next(i for i, v in enumerate(grown) if v > HALF)
    found = warnings(grown[:death])
    assert found
    trend = found[0].trends[0]
    ahead = death - found[0].step
    assert ahead >= 10, "in time"
    assert 0.6 * ahead <= trend.left <= 2 * ahead, "at the onset the rate is taken as the slower of two"
    assert 1 < trend.rate <= rate * 1.05
    assert f"reaches 65,504 in about {round(trend.left)} steps" in str(found[0])


def test_growth_that_slows_down_is_learning() -> None:
    """Outputs of healthy runs grow like a logarithm of the step."""
    assert warnings([0.5 * math.log(i + 2) for i in range(3000)]) == []


def test_a_burst_that_comes_back_is_no_warning() -> None:
    curve = noisy(1.0, 300, spread=0.2)
    curve[150:153] = [12.0, 9.0, 5.0]  # a warm restart, a hard batch
    assert warnings(curve, "grad_norm", None) == []


def test_the_loss_scale_breaks_by_falling() -> None:
    scales = [65536.0] * 100 + [65536.0 / 2 ** (i // 4) for i in range(64)]
    found = warnings(scales, "scale", None)
    assert found
    assert "the loss scale falls" in str(found[0])
    assert found[0].trends[0].value > 1


def test_an_update_as_large_as_the_weights_is_trouble_without_any_history() -> None:
    assert warnings([0.02] * 100, "update_ratio/w", None) == []
    found = warnings([0.4] * 100, "update_ratio/w", None)
    assert len(found) == 1
    assert "each update changes w by 40% of its size (healthy: below 5%)" in str(found[0])


def test_weights_that_begin_at_zero_are_not_at_risk() -> None:
    """The second matrix of an adapter: its first updates are larger than itself."""
    assert warnings([1e9, *(2.0 / t for t in range(1, 300))], "update_ratio/lora_B", None) == []


def test_once_and_again_only_when_it_worsens() -> None:
    forecast = Forecast()
    told: list[tuple[float, str]] = []
    for step in range(400):
        largest = 20.0 * 1.1 ** max(0, step - 100)
        warning = forecast.read(step, {"absmax/x": min(largest, 6e4)}, {"absmax/x": HALF})
        told += [(warning.risk, warning.severity)] if warning else []
    assert [severity for _, severity in told] in (["warning", "critical"], ["critical"])
    assert all(risk >= (WARN if severity == "warning" else CRITICAL) for risk, severity in told)


def test_after_a_calm_time_a_new_rise_is_news() -> None:
    up = [20.0 * 1.3**i for i in range(20)]
    down = [20.0] * (CALM + 40)
    again = [20.0 * 1.3 ** min(i, 34) for i in range(40)]
    assert {w.step // 150 for w in warnings([*[20.0] * 40, *up, *down, *again])} == {0, 1}


def test_several_quantities_are_worse_than_one() -> None:
    one, two = Forecast(), Forecast()
    for step in range(60):
        grown = 1.06 ** max(0, step - 40)
        one.read(step, {"loss": grown, "grad_norm": 1.0})
        two.read(step, {"loss": grown * 3, "grad_norm": grown * 3})
    for step in range(60, 75):
        one.read(step, {"loss": 15.0, "grad_norm": 1.0})
        two.read(step, {"loss": 15.0 * 1.01 ** (step - 60), "grad_norm": 15.0 * 1.01 ** (step - 60)})
    assert two.risk >= one.risk


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_the_risk_is_a_number_from_0_to_1_whatever_comes(values: list[float]) -> None:
    forecast = Forecast()
    for step, value in enumerate(values):
        forecast.read(step, {"loss": value, "scale": value, "absmax/a": value, "update_ratio/a": value})
        assert 0.0 <= forecast.risk <= 1.0


@given(st.floats(1e-6, 1e6), st.integers(0, 5))
def test_units_do_not_matter(unit: float, seed: int) -> None:
    curve = [v * 1.2 ** max(0, i - 60) for i, v in enumerate(noisy(20.0, 100, seed, 0.1))]
    plain = [w.step for w in warnings(curve)]
    scaled = [w.step for w in warnings([v * unit for v in curve], limit=HALF * unit)]
    assert plain == scaled


def test_values_that_are_not_finite_say_nothing() -> None:
    curve = noisy(20.0, 60, spread=0.1) + [20.0 * 1.2**i for i in range(30)]
    holes: list[float] = []
    for i, v in enumerate(curve):
        holes += [v] if i % 7 else [v, math.nan, math.inf, 0.0]
    assert [str(t.name) for w in warnings(holes) for t in w.trends] == ["absmax/block"] * len(warnings(holes))
    assert warnings(holes)


def test_an_own_limit_from_either_side() -> None:
    for values, limit in (
        ([0.9 * 0.9 ** max(0, i - 40) for i in range(80)], 0.01),
        ([1.2 ** max(0, i - 40) for i in range(80)], 900.0),
    ):
        forecast = Forecast()
        forecast.set_limit("mine", limit)
        found = [forecast.read(i, {"mine": v}) for i, v in enumerate(values)]
        assert any(found)
    forecast = Forecast()
    assert not any(forecast.read(i, {"mine": 2.0**i}) for i in range(100)), "a name without a limit is only logged"
