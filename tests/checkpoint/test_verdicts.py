"""What makes a checkpoint suspect, corrupt or damaged, and what must not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import writers
from checkpoint.writers import INF, NAN
from nanproof.checkpoint import ScanReport, scan


def saved(state: Any, path: Path) -> ScanReport:
    torch.save(state, path)
    return scan(path)


def test_a_trained_state_is_healthy(tmp_path: Path) -> None:
    report = saved(writers.training_state(), tmp_path / "a.pt")
    assert (report.health, report.reasons, report.checksums) == ("healthy", (), "verified")
    assert scan(tmp_path / "a.pt", fast=True).checksums == "skipped"


def test_bad_buffers_with_finite_parameters_are_repairable(tmp_path: Path) -> None:
    state = writers.training_state()
    state["model"]["1.running_mean"][1] = NAN
    state["model"]["1.running_var"][1] = INF
    report = saved(state, tmp_path / "a.pt")
    assert report.health == "corrupt"
    assert report.reasons == ("2 of 2 buffers NaN and Inf, parameters finite",)
    assert report.repairable


def test_bad_parameters_are_not_repairable(tmp_path: Path) -> None:
    state = writers.training_state()
    for name, tensor in state["model"].items():
        if "running" not in name and tensor.is_floating_point():
            tensor[...] = NAN
    report = saved(state, tmp_path / "a.pt")
    assert report.reasons == ("6 of 6 parameters NaN",)
    assert not report.repairable


SUSPECTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "negative second moment": (
        lambda s: s["optimizer"]["state"][0]["exp_avg_sq"][0].fill_(-0.5),
        "optimizer.state.0.exp_avg_sq: a second moment is negative (-0.5)",
    ),
    "absurd parameter": (
        lambda s: s["model"]["4.weight"][0].fill_(3e7),
        "model.4.weight: values up to 3e+07 are absurd for a parameter",
    ),
    "edge of the format": (
        lambda s: s["model"].update(w=torch.full((3,), 4e4).half()),
        "within a factor of 2 of the largest float16",
    ),
    "dead matrix": (lambda s: s["model"]["4.weight"].zero_(), "model.4.weight: is all zero"),
    "constant matrix": (
        lambda s: s["model"]["4.weight"].fill_(0.25),
        "model.4.weight: holds the same number everywhere",
    ),
    "steps disagree": (
        lambda s: s["optimizer"]["state"][1]["step"].fill_(9),
        "step counters of the optimizer disagree: 3 to 9",
    ),
    "collapsed scale": (
        lambda s: s.update(scaler=torch.amp.GradScaler("cpu", init_scale=1e-6).state_dict()),
        "the loss scale has fallen to 1e-06",
    ),
}


@pytest.mark.parametrize("what", SUSPECTS)
def test_finite_but_wrong_is_suspect(what: str, tmp_path: Path) -> None:
    change, words = SUSPECTS[what]
    state = writers.training_state()
    change(state)
    report = saved(state, tmp_path / "a.pt")
    assert report.health == "suspect", report.reasons
    assert len(report.reasons) == 1
    assert words in report.reasons[0]


FINE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "zero bias": lambda s: s["model"]["4.bias"].zero_(),
    "norm weights of ones": lambda s: s["model"].update({"norm.weight": torch.ones(64), "gamma": torch.ones(64, 1, 1)}),
    "fresh LoRA": lambda s: s["model"].update({"lora_B.weight": torch.zeros(8, 8)}),
    "zero moments": lambda s: s["optimizer"]["state"][0]["exp_avg_sq"].zero_(),
    "minus zero in a second moment": lambda s: s["optimizer"]["state"][0]["exp_avg_sq"].fill_(-0.0),
    "masks of -Inf": lambda s: s["model"].update(attn_mask=torch.full((4, 4), -INF).triu(1)),
    "masks of the lowest number": lambda s: s["model"].update(
        attn_mask=torch.full((4, 4), torch.finfo(torch.float32).min)
    ),
    "full-range fp8": lambda s: s["model"].update(
        w8=(torch.randn(64, 64) * 200).clamp(-448, 448).to(torch.float8_e4m3fn)
    ),
    "a loop that counts batches": lambda s: s.update(step=50),
}


@pytest.mark.parametrize("what", FINE)
def test_what_is_meant_is_not_suspect(what: str, tmp_path: Path) -> None:
    state = writers.training_state()
    FINE[what](state)
    report = saved(state, tmp_path / "a.pt")
    assert report.health == "healthy", report.reasons


def test_a_trainer_that_counts_otherwise_than_its_optimizer(tmp_path: Path) -> None:
    torch.save(writers.training_state()["optimizer"], tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 50}')
    assert scan(tmp_path).reasons == ("the optimizer has made 3 steps, the trainer 50",)
    torch.save(torch.amp.GradScaler("cpu").state_dict(), tmp_path / "scaler.pt")  # a scaler skips steps
    assert scan(tmp_path).health == "healthy"
    (tmp_path / "scaler.pt").unlink()
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    assert scan(tmp_path).health == "healthy"


def test_a_bad_learning_rate_or_scale_is_corrupt(tmp_path: Path) -> None:
    state = writers.training_state()
    state["optimizer"]["param_groups"][0]["lr"] = NAN
    assert saved(state, tmp_path / "a.pt").reasons == ("lr is nan",)
    scaler = torch.amp.GradScaler("cpu", init_scale=INF).state_dict()
    report = saved(writers.training_state(scaler=scaler), tmp_path / "b.pt")
    assert (report.health, report.reasons, report.repairable) == ("corrupt", ("scale is inf",), True)


def test_a_flipped_bit_is_damage_unless_fast(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    marker = torch.full((6 << 20,), 0.123)  # larger than one block: several threads share its checksum
    marker[::2] = 0.5
    torch.save({"w": marker}, path)
    assert scan(path, jobs=2).health == "healthy"
    data = bytearray(path.read_bytes())
    data[data.find(marker[:8].numpy().tobytes()) + (3 << 20)] ^= 1
    path.write_bytes(data)
    report = scan(path, jobs=2)
    assert report.health == "damaged"
    assert "1 of 1 checksums fail (w)" in report.reasons[0]
    assert scan(path, fast=True).health == "healthy"


def test_tied_weights_that_differ(tmp_path: Path) -> None:
    embedding = torch.randn(8, 4)
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    save_file(
        {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors"
    )
    assert scan(tmp_path).health == "healthy"
    save_file(
        {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding * 1.01}, tmp_path / "model.safetensors"
    )
    report = scan(tmp_path)
    assert report.reasons == ("lm_head.weight and model.embed_tokens.weight are tied in config.json and differ here",)
    assert report.health == "suspect"


def test_replicas_that_differ(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    for rank in range(3):
        torch.save({"ema": {"w": torch.ones(4, 4) * 0.5 + torch.eye(4)}}, tmp_path / f"ema_rank{rank}.pt")
    assert scan(tmp_path).health == "healthy"
    torch.save({"ema": {"w": torch.ones(4, 4) * 0.5 - torch.eye(4)}}, tmp_path / "ema_rank2.pt")
    assert scan(tmp_path).reasons == ("ema_rank0.pt and ema_rank2.pt differ in 1 tensor (ema.w)",)


def test_a_report_is_frozen_and_iterates_over_tensors(tmp_path: Path) -> None:
    report = saved({"a": torch.randn(3), "b": torch.arange(3)}, tmp_path / "a.pt")
    assert [t.name for t in report] == ["a", "b"]
    assert len(report) == 2
    with pytest.raises(AttributeError):
        report.health = "healthy"  # type: ignore[misc]


def test_the_detailed_look_counts_exactly(tmp_path: Path) -> None:
    w = torch.randn(3000, 1000)
    w[2999, 999], w[1500, 3], w[0, 1], w[0, 2] = NAN, INF, -INF, -INF
    facts = saved({"w": w}, tmp_path / "a.pt").bad[0].facts
    assert facts is not None
    assert (facts.nan, facts.posinf, facts.neginf, facts.first_bad) == (1, 1, 2, (0, 1))
    finite = w[torch.isfinite(w)]
    assert (facts.finite_min, facts.finite_max) == (finite.min().item(), finite.max().item())


VERSION = ("archive/version", b"3\n")


def test_a_view_of_more_elements_than_can_be_counted_is_damaged(tmp_path: Path) -> None:
    from checkpoint.corpus import _storage_pickle, _zip

    for shape, stride in (((2**31 - 1,) * 3, (0, 0, 0)), ((0, 2**61, 2**61), (1, 1, 1)), ((2**61, 4), (0, 1))):
        data = _zip([("archive/data.pkl", _storage_pickle(16, shape, stride)), ("archive/data/0", bytes(64)), VERSION])
        path = tmp_path / "huge.pt"
        path.write_bytes(data)
        report = scan(path)
        assert report.health == "damaged"
        assert "more elements" in report.reasons[0]
    path.write_bytes(
        _zip([("archive/data.pkl", _storage_pickle(1, (2**40,), (0,))), ("archive/data/0", bytes(4)), VERSION])
    )
    report = scan(path)
    assert report.health == "suspect"
    assert "1,099,511,627,776 elements over 4 bytes" in report.reasons[0]


def test_empty_tensors_alone_are_nothing_to_call_healthy(tmp_path: Path) -> None:
    torch.save({"a": torch.empty(0, 4), "b": torch.empty(0)}, tmp_path / "empty.pt")
    report = scan(tmp_path / "empty.pt")
    assert report.health == "suspect"
    assert "no floating-point number" in report.reasons[0]
