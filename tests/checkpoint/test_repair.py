"""Repair: the copy loads in torch, differs only where it says, and no weight is ever invented."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import writers
from checkpoint.writers import INF, NAN
from nanproof.checkpoint import scan
from nanproof.checkpoint.layout import discover
from nanproof.checkpoint.repair import Repair, repair
from nanproof.errors import UsageError


def repaired(path: Path, out: Path, against: Path | None = None) -> Repair:
    (checkpoint,) = discover([path])
    reference = discover([against])[0] if against else None
    return repair(checkpoint, scan(path), out, reference)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.parametrize("legacy", [False, True])
def test_buffers_moments_and_scale(legacy: bool, tmp_path: Path) -> None:
    state = writers.training_state(scaler=torch.amp.GradScaler("cpu", init_scale=INF).state_dict())
    state["model"]["1.running_var"][2] = NAN
    state["optimizer"]["state"][4]["exp_avg"][0, 0] = INF
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    before = digest(tmp_path / "a.pt")
    result = repaired(tmp_path / "a.pt", tmp_path / "b.pt")
    assert result.refused == ""
    assert digest(tmp_path / "a.pt") == before
    assert scan(tmp_path / "b.pt").health == "suspect"  # finite; the fresh state counts its steps from 0
    assert scan(tmp_path / "b.pt").reasons == ("step counters of the optimizer disagree: 0 to 3",)

    fixed = torch.load(tmp_path / "b.pt", weights_only=False)
    assert fixed["scaler"]["scale"] == 65536.0
    assert fixed["model"]["1.running_mean"].tolist() == [0.0] * 8
    assert fixed["model"]["1.running_var"].tolist() == [1.0] * 8
    assert fixed["model"]["1.num_batches_tracked"].item() == 0
    fresh = fixed["optimizer"]["state"][4]
    assert fresh["exp_avg"].abs().sum() == fresh["exp_avg_sq"].abs().sum() == fresh["step"] == 0
    touched = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(same(v, fixed["model"][k]) for k, v in state["model"].items() if k not in touched)
    for i, moments in state["optimizer"]["state"].items():
        assert i == 4 or all(same(v, fixed["optimizer"]["state"][i][k]) for k, v in moments.items())
    said = "\n".join(result.done)
    for words in (
        "1.running_mean",
        "mean 0, variance 1",
        "optimizer.state.4.",
        "back to zero",
        "loss scale: inf → 65536",
    ):
        assert words in said
    model, optimizer, _ = writers.trained()
    model.load_state_dict(fixed["model"])
    optimizer.load_state_dict(fixed["optimizer"])
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_buffers_come_from_the_reference(tmp_path: Path) -> None:
    good = writers.training_state()
    torch.save(good, tmp_path / "good.pt")
    bad = writers.training_state()
    bad["model"]["1.running_mean"][:] = NAN
    torch.save(bad, tmp_path / "bad.pt")
    result = repaired(tmp_path / "bad.pt", tmp_path / "out.pt", tmp_path / "good.pt")
    fixed = torch.load(tmp_path / "out.pt")
    assert torch.equal(fixed["model"]["1.running_mean"], good["model"]["1.running_mean"])
    assert "taken from good.pt" in result.done[0]


def test_a_lost_average_restarts_from_its_parameter(tmp_path: Path) -> None:
    w = torch.randn(4, 4)
    ema = w.clone()
    ema[0, 0] = NAN
    torch.save({"model": {"w": w}, "ema": {"w": ema}}, tmp_path / "a.pt")
    assert repaired(tmp_path / "a.pt", tmp_path / "b.pt").done == ("ema.w: restarted from model.w",)
    assert torch.equal(torch.load(tmp_path / "b.pt")["ema"]["w"], w)


def test_safetensors(tmp_path: Path) -> None:
    state = {k: v.contiguous() for k, v in writers.trained()[0].state_dict().items()}
    state["1.running_mean"][0] = NAN
    save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt"})
    repaired(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    fixed = load_file(tmp_path / "b.safetensors")
    assert fixed["1.running_mean"].abs().sum() == 0
    assert torch.equal(fixed["4.weight"], state["4.weight"])
    a, b = (tmp_path / "a.safetensors").read_bytes(), (tmp_path / "b.safetensors").read_bytes()
    assert len(a) == len(b)
    assert sum(x != y for x, y in zip(a, b, strict=True)) <= 2 * 8 * 4 + 8  # two buffers and a count, nothing else


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_folders_are_copied_whole(tmp_path: Path) -> None:
    folder = writers.accelerate_state(tmp_path / "state")
    state = load_file(folder / "model.safetensors")
    state["1.running_var"][0] = INF
    save_file(state, folder / "model.safetensors")
    repaired(folder, tmp_path / "fixed")
    assert {p.name for p in folder.iterdir()} == {p.name for p in (tmp_path / "fixed").iterdir()}
    assert digest(folder / "optimizer.bin") == digest(tmp_path / "fixed" / "optimizer.bin")
    assert scan(tmp_path / "fixed").health == "healthy"


@pytest.mark.filterwarnings("ignore")
def test_dcp_blobs_get_their_checksums_back(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = writers.training_state()
    state["model"]["1.running_mean"][0] = NAN
    dcp.save({"model": state["model"]}, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    assert scan(tmp_path / "a").repairable
    repaired(tmp_path / "a", tmp_path / "b")
    assert scan(tmp_path / "b").health == "healthy"
    fresh = {"model": writers.small_model().state_dict()}
    dcp.load(fresh, checkpoint_id=str(tmp_path / "b"), no_dist=True)
    assert fresh["model"]["1.running_mean"].abs().sum() == 0
    assert torch.equal(fresh["model"]["4.weight"], state["model"]["4.weight"])


def test_lost_weights_are_not_invented(tmp_path: Path) -> None:
    state = writers.training_state()
    state["model"]["4.weight"][0, 0] = NAN
    torch.save(state, tmp_path / "a.pt")
    torch.save(writers.training_state(), tmp_path / "good.pt")
    result = repaired(tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "good.pt")
    assert result.refused == "model.4.weight is lost, and only training can make it; go back to a healthy checkpoint"
    assert not (tmp_path / "b.pt").exists()


def test_master_weights_of_deepspeed_are_not_zeroed(tmp_path: Path) -> None:
    folder = writers.deepspeed_folder(tmp_path / "ds") / "global_step4"
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(path)
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0][3] = NAN
    torch.save(state, path)
    assert "is lost" in repaired(folder, tmp_path / "out").refused


def test_nothing_to_repair_and_nothing_overwritten(tmp_path: Path) -> None:
    torch.save(writers.training_state(), tmp_path / "a.pt")
    assert "it is healthy" in repaired(tmp_path / "a.pt", tmp_path / "b.pt").refused
    with pytest.raises(UsageError, match="exists already"):
        repaired(tmp_path / "a.pt", tmp_path / "a.pt")
