"""Every format, written by the library that writes it, read without that library."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from checkpoint import writers
from checkpoint.writers import INF, NAN
from nanproof.checkpoint import ScanReport, scan, scan_series

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries that write the files warn about themselves


def names(report: ScanReport) -> set[str]:
    return {t.name for t in report}


def flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of nested dicts and lists by dotted name, as torch sees them."""
    found: dict[str, torch.Tensor] = {}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, torch.Tensor):
            found[name] = value
        else:
            found |= flat(value, name)
    return found


WAYS: dict[str, Any] = {
    "zip": lambda state, path: torch.save(state, path),
    "legacy": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "pickle": lambda state, path: path.write_bytes(pickle.dumps(state)),
}


@pytest.mark.parametrize("way", WAYS)
def test_torch_files_name_every_tensor(way: str, tmp_path: Path) -> None:
    state = writers.training_state()
    WAYS[way](state, tmp_path / "a.pt")
    report = scan(tmp_path / "a.pt")
    expected = flat(state)
    assert names(report) == set(expected)
    assert {t.name: (t.shape, f"torch.{t.dtype}") for t in report} == {
        name: (tuple(t.shape), str(t.dtype)) for name, t in expected.items()
    }
    assert report.health == "healthy", report.reasons
    assert report.settings.lr == pytest.approx(state["optimizer"]["param_groups"][0]["lr"])
    assert report.settings.optimizer_steps == (3, 3)
    assert report.settings.base_lr == pytest.approx(4e-3 / 25)


@pytest.mark.parametrize("way", WAYS)
def test_torch_files_find_what_torch_finds(way: str, tmp_path: Path) -> None:
    """Views, transposes, slices with gaps, expanded and shared storages, complex, nested ten levels deep."""
    x = torch.randn(40, 30)
    x[5, 7], x[20, 0], x[20, 1] = INF, -INF, NAN
    deep: Any = {"x": x[0:4]}
    for _ in range(10):
        deep = [deep, {"again": deep}]
    complex_ = torch.zeros(3, 4, dtype=torch.complex64)
    complex_[1, 2] = complex(1, NAN)
    state = {
        "x": x,
        "t": x.t(),
        "rows": x[::5],
        "columns": x[:, ::2],
        "good_columns": x[:, 9::2],
        "gap": x[::2, 2:6],
        "good_gap": x[:, 2:7][8:],
        "one": x[20, 1],
        "deep": deep,
        "good": x[6:20],
        "expanded": x[5, 7].expand(3, 3),
        "complex": complex_,
        "empty": torch.zeros(0, 3),
        "strided": torch.as_strided(x, (3, 3), (1, 1), 0),
        "parameter": torch.nn.Parameter(x[:3]),
    }
    WAYS[way](state, tmp_path / "a.pt")
    report = scan(tmp_path / "a.pt")
    seen = {t.name: t for t in report}
    assert any(t.name.count(".") >= 10 for t in report)
    for name, tensor in flat({k: v for k, v in state.items() if k != "deep"}).items():
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        bad = int((~torch.isfinite(parts)).sum())
        facts = seen[name].facts
        assert (facts.bad if facts else 0) == bad, name
        if facts:
            assert facts.nan == int(torch.isnan(parts).sum()), name
            assert facts.posinf == int((parts == INF).sum()), name
            assert facts.first_bad is not None
            assert not torch.isfinite(tensor[facts.first_bad]).all(), name
        if facts and facts.finite_max is not None:
            assert facts.finite_max == pytest.approx(float(parts[torch.isfinite(parts)].max()))


def test_shared_storage_is_read_once(tmp_path: Path) -> None:
    from nanproof.checkpoint.source import LocalFile
    from nanproof.checkpoint.sweep import sweep_file
    from nanproof.checkpoint.torchzip import read_torch_zip

    weight = torch.randn(1 << 19)
    torch.save({"a": weight, "b": weight, "c": weight.view(2, -1)}, tmp_path / "a.pt")

    class Counting(LocalFile):
        total = 0

        def read_into(self, view: memoryview, offset: int) -> None:
            Counting.total += len(view)
            super().read_into(view, offset)

    source = Counting(str(tmp_path / "a.pt"))
    contents = read_torch_zip(source, check=False)
    assert len(contents.tensors) == 3
    Counting.total = 0
    sweep_file(source, contents, jobs=2)
    assert Counting.total == weight.nbytes
    source.close()


E8M0 = getattr(torch, "float8_e8m0fnu", None)  # since torch 2.7
FLOATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    *filter(None, [E8M0]),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("way", ["zip", "legacy", "safetensors"])
def test_every_float_format(dtype: torch.dtype, way: str, tmp_path: Path) -> None:
    if way == "safetensors" and dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        pytest.skip("safetensors does not write this format")
    codes = {
        torch.float8_e4m3fn: 0x7F,
        E8M0: 0xFF,
        torch.float8_e4m3fnuz: 0x80,
        torch.float8_e5m2fnuz: 0x80,
    }
    good = (torch.rand(64, 3) + 0.5).to(dtype)
    bad = good.clone()
    if dtype in codes:
        bad.view(torch.uint8)[40, 2] = codes[dtype]
    else:
        bad[40, 2] = NAN
    path = tmp_path / "a.bin"
    WAYS.get(way, save_file)({"good": good, "bad": bad}, path)
    report = {t.name: t for t in scan(path)}
    assert report["good"].state == "finite"
    facts = report["bad"].facts
    assert facts is not None
    assert (facts.nan, facts.first_bad, f"torch.{report['bad'].dtype}") == (1, (40, 2), str(dtype))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="since torch 2.8")
def test_fp4_and_integers_are_not_called_finite_by_mistake(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"packed": torch.randint(0, 255, (8, 8), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, path)
    assert next(iter(scan(path))).state == "finite"  # there is no code for NaN in it
    torch.save({"q": torch.randint(0, 255, (8, 8), dtype=torch.uint8)}, path)
    report = scan(path)
    assert next(iter(report)).state == "not applicable"
    assert report.health == "suspect"


def test_quantized_scales_are_scanned(tmp_path: Path) -> None:
    scales = torch.ones(4, dtype=torch.float64)
    scales[2] = NAN
    quantized = torch.quantize_per_channel(torch.randn(4, 4), torch.ones(4), torch.zeros(4), 0, torch.qint8)
    torch.save({"w": quantized}, tmp_path / "good.pt")
    report = {t.name: t for t in scan(tmp_path / "good.pt")}
    assert report["w"].state == "not applicable"
    assert report["w.quantizer.1"].state == "finite"
    torch.save(
        {"w": torch._make_per_channel_quantized_tensor(torch.ones(4, 4).char(), scales, torch.zeros(4).long(), 0)},
        tmp_path / "bad.pt",
    )
    assert [t.name for t in scan(tmp_path / "bad.pt").bad] == ["w.quantizer.1"]


def test_numpy_arrays_inside_a_pickle(tmp_path: Path) -> None:
    torch.save({"stats": np.array([[1.0, NAN]]), "mean": np.float64(2.0), "names": np.array(["a"])}, tmp_path / "a.pt")
    report = scan(tmp_path / "a.pt")
    facts = {t.name: t for t in report}["stats"].facts
    assert facts is not None
    assert (facts.nan, facts.first_bad) == (1, (0, 1))


@pytest.mark.parametrize("way", WAYS)
def test_a_storage_that_stands_alone(way: str, tmp_path: Path) -> None:
    """Nothing that holds numbers is passed over."""
    storage = torch.tensor([1.0, NAN]).storage()
    WAYS[way]({"w": torch.randn(3), "raw": storage, "alone": torch.tensor(3.0)}, tmp_path / "a.pt")
    (bad,) = scan(tmp_path / "a.pt").bad
    assert (bad.name, bad.shape) == ("raw", (2,))
    WAYS[way](storage, tmp_path / "b.pt")
    assert scan(tmp_path / "b.pt").health == "corrupt"


def test_a_whole_pickled_module_is_named_like_its_state_dict(tmp_path: Path) -> None:
    torch.save(writers.small_model(), tmp_path / "m.pt")
    assert names(scan(tmp_path / "m.pt")) == set(writers.small_model().state_dict())


def test_safetensors_and_shards(tmp_path: Path) -> None:
    folder = writers.sharded_safetensors(tmp_path / "sharded")
    report = scan(folder)
    assert report.health == "healthy", report.reasons
    assert len(report.files) > 1
    assert len(report) == 21
    assert scan(folder / "model.safetensors.index.json").health == "healthy"
    shard = next(folder.glob("model-00002*.safetensors"))
    shard.unlink()
    assert scan(folder).health == "damaged"
    assert "model-00002-of" in scan(folder).reasons[0]


def test_hf_trainer(tmp_path: Path) -> None:
    folder = writers.hf_trainer(tmp_path / "hf")
    # on a CPU the Trainer makes no scaler; this one is written as it writes it
    torch.save(torch.amp.GradScaler("cpu").state_dict(), folder / "checkpoint-4" / "scaler.pt")
    series = scan_series(folder)
    assert [(r.name, r.health, r.step) for r in series] == [
        ("checkpoint-2", "healthy", 2),
        ("checkpoint-4", "healthy", 4),
    ]
    first, last = series.reports
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"} <= set(
        first.files
    )
    assert last.settings.scale == 65536.0
    assert first.settings.initial_lr == pytest.approx(1e-4)
    assert first.settings.arguments["adam_epsilon"] == pytest.approx(1e-8)
    assert first.settings.arguments["logging_nan_inf_filter"] is True
    assert first.settings.arguments["max_grad_norm"] == 1.0
    assert first.notes == ()


def test_lightning(tmp_path: Path) -> None:
    report = scan(writers.lightning_ckpt(tmp_path))
    assert report.health == "healthy", report.reasons
    assert {"state_dict.net.weight", "optimizer_states.0.state.0.exp_avg"} <= names(report)
    assert (report.settings.lr, report.settings.step) == (pytest.approx(2e-4), 4)
    assert any("best_score" in note for note in report.notes)  # Inf there is meant


def test_accelerate(tmp_path: Path) -> None:
    report = scan(writers.accelerate_state(tmp_path / "state"))
    assert report.health == "healthy", report.reasons
    assert set(report.files) == {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"}


def test_deepspeed_layout(tmp_path: Path) -> None:
    (report,) = scan_series(writers.deepspeed_folder(tmp_path / "ds")).reports
    assert (report.name, report.health, report.settings.step) == ("global_step4", "healthy", 4), report.reasons
    assert len(report.files) == 3


@pytest.mark.slow
def test_dcp_written_by_two_fsdp_ranks(tmp_path: Path) -> None:
    report = scan(writers.dcp_folder(tmp_path / "good"))
    assert report.health == "healthy", report.reasons
    assert report.settings.lr == pytest.approx(3e-4)
    assert report.checksums == "verified"
    bad = scan(writers.dcp_folder(tmp_path / "bad", bad=True))
    assert [t.name for t in bad.bad] == ["model.0.weight@8,0"]
    assert bad.bad[0].file == "__1_0.distcp"
    file = tmp_path / "good" / "__1_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-40])
    assert scan(tmp_path / "good").health == "damaged"
    file.unlink()
    assert "__1_0.distcp is missing" in scan(tmp_path / "good").reasons[0]


def test_gguf(tmp_path: Path) -> None:
    report = scan(writers.gguf_file(tmp_path / "a.gguf"))
    assert report.health == "healthy", report.reasons
    assert {t.dtype for t in report} == {"float32", "float16", "q8_0", "q4_0", "q5_1"}
    assert [t.name for t in scan(writers.gguf_file(tmp_path / "b.gguf", bad=True)).bad] == ["Q4_0.weight"]


def test_lists_of_unusual_names_and_executes_none(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 2).normal_(), "config": Path}, tmp_path / "usual.pt")
    assert scan(tmp_path / "usual.pt").notes == ()
    torch.save({"w": torch.randn(2, 2), "hook": pytest.main}, tmp_path / "odd.pt")
    (note,) = scan(tmp_path / "odd.pt").notes
    assert "_pytest" in note
    assert "without calling it" in note
