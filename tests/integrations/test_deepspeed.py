"""DeepSpeed's own answers to bad steps, watched; `make engines` runs this in an environment that has DeepSpeed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

deepspeed = pytest.importorskip("deepspeed", reason="make engines runs this in an environment that has DeepSpeed")

from nanproof import Policy  # noqa: E402
from nanproof.errors import GuardStop  # noqa: E402
from nanproof.integrations.deepspeed import guard_engine  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # those of the library itself


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # compiles for minutes
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as launched:
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            launched.setenv(name, value)
        deepspeed.init_distributed("gloo")
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
        yield
    dist.destroy_process_group()


def make_engine(precision: str = "bf16", **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10_000,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        precision: {"enabled": True, **more},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: Any, value: float) -> None:
    x = torch.full((2, 4), value, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().mean())
    engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_bad_steps_in_a_row_restore_the_engines_own_checkpoint_then_stop(tmp_path: Path) -> None:
    engine = make_engine()
    guard = guard_engine(engine, run_dir=tmp_path / "run", policy=Policy(max_consecutive=2))
    step(engine, 1.0)
    engine.save_checkpoint(str(tmp_path / "saved"))
    kept = weights(engine)
    step(engine, 0.5)
    assert not same(weights(engine), kept)
    for _ in range(3):
        step(engine, float("nan"))
    assert same(weights(engine), kept)
    assert guard.tally.updates == 1
    for _ in range(2):
        step(engine, float("nan"))
    with pytest.raises(GuardStop, match="2 bad steps in a row after 1 restore"):
        step(engine, float("nan"))
    assert same(weights(engine), kept)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_whose_every_step_is_skipped(precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = {"initial_scale_power": 30, "hysteresis": 1} if precision == "fp16" else {}
    engine = make_engine(precision, **more)
    guard_engine(engine, run_dir=tmp_path / "run", policy=Policy(max_consecutive=100))
    before = weights(engine)
    with caplog.at_level(logging.ERROR, logger="nanproof"):
        for _ in range(11):
            # fp16: finite, but every gradient overflows under such a scale
            step(engine, float("nan") if precision == "bf16" else 2000.0)
    assert same(weights(engine), before)
    assert [r for r in caplog.messages if "skipped the last 10 steps: no parameter has moved since update 0" in r]


def test_where_deepspeed_does_not_check_the_step_is_vetoed(tmp_path: Path) -> None:
    bare, engine = (make_engine(check_grad_overflow=False) for _ in range(2))
    guard = guard_engine(engine, run_dir=tmp_path / "run")
    for one in (bare, engine):
        step(one, 1.0)
        step(one, float("nan"))
    assert not all(w.isfinite().all() for w in weights(bare))
    assert all(w.isfinite().all() for w in weights(engine))
    (incident,) = (tmp_path / "run" / "incidents").iterdir()
    assert "batch" in (incident / "incident.json").read_text()
    assert guard.tally.steps == 2
