"""Under torchrun, over fsspec, and within the memory cap."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import writers
from checkpoint.test_hostile import CAP, PEAK, bare_interpreter
from nanproof.checkpoint import scan, scan_series, scan_spread
from nanproof.errors import UsageError

pytestmark = pytest.mark.slow


def test_two_ranks_print_one_report(tmp_path: Path) -> None:
    writers.series(tmp_path / "run", "hhb")
    folder = tmp_path / "run" / "final"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    for i in (1, 2):
        torch.save({f"w{i}": torch.randn(40, 40)}, folder / f"pytorch_model-{i:05}-of-00002.bin")
    scan_it = ("-m", "nanproof", "scan", str(tmp_path / "run"), "--json")
    two = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    alone, both = (
        subprocess.run([sys.executable, *launcher, *scan_it], text=True, capture_output=True, timeout=600)
        for launcher in ((), two)
    )
    assert both.returncode == alone.returncode == 1
    assert json.loads(both.stdout)["series"] == json.loads(alone.stdout)["series"]


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 1,000 shards with an index; one has a NaN and one is cut off."""
    folder = tmp_path_factory.mktemp("thousand")
    index = {}
    for i in range(1, 1001):
        weight = torch.full((4, 4), float(i))
        weight[0, 0] = float("nan") if i == 500 else 0.5
        path = folder / f"pytorch_model-{i:05}-of-01000.bin"
        torch.save({f"w{i}": weight}, path)
        if i == 700:
            path.write_bytes(path.read_bytes()[:-30])
        index[f"w{i}"] = path.name
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.campaign
def test_a_thousand_shards_under_torchrun(thousand: Path) -> None:
    alone = scan(thousand)
    command = ("-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone", "-m", "nanproof", "scan")
    ranks = subprocess.run(
        [sys.executable, *command, str(thousand), "--json"], text=True, capture_output=True, timeout=600
    )
    (report,) = json.loads(ranks.stdout)["series"]["reports"]
    assert ranks.returncode == 1
    assert report["health"] == alone.health == "damaged"
    assert report["reasons"] == list(alone.reasons)
    assert len(report["tensors"]) == len(alone.tensors) == 999
    assert any("00700" in reason for reason in alone.reasons)


def test_a_thousand_shards_as_tasks_of_ray(thousand: Path) -> None:
    ray = pytest.importorskip("ray", reason="make engines runs this in an environment that has Ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        task = ray.remote(lambda work, share: (os.getpid(), work(share)))
        pids = set()

        def run(work: Any, shares: list[Any]) -> list[Any]:
            answers = ray.get([task.remote(work, share) for share in shares])
            pids.update(pid for pid, _ in answers)
            return [found for _, found in answers]

        assert scan_spread(thousand, run, shares=8) == scan(thousand)
        assert os.getpid() not in pids
    finally:
        ray.shutdown()


def test_tasks_in_other_processes_give_the_same_report(tmp_path: Path) -> None:
    """What is sent to them and what comes back can be pickled, as Ray and every pool of processes need it."""
    for i in range(1, 8):
        weight = torch.randn(8 * i, 8)
        weight[0, 0] = float("nan") if i == 5 else 0.5
        torch.save({f"w{i}": weight}, tmp_path / f"pytorch_model-{i:05}-of-00007.bin")

    def run(work: Any, shares: list[Any]) -> list[Any]:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(work, shares))

    spread = scan_spread(tmp_path, run, shares=3)
    assert spread.health == "corrupt"
    assert spread == scan(tmp_path)


def test_remote_files(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    run = writers.series(tmp_path, "hb")
    for path in run.iterdir():
        memory.pipe(f"/run/{path.name}", path.read_bytes())
    memory.pipe("/run/deep/checkpoint-3/model.safetensors", b"")
    try:
        series = scan_series("memory://run")
        assert {(r.name, r.health) for r in series} == {
            ("step_0.pt", "healthy"),
            ("step_1.pt", "corrupt"),
            ("deep/checkpoint-3", "damaged"),
        }
        assert [r.name for r in scan_series("memory://run/step_*.pt")] == ["step_0.pt", "step_1.pt"]
        assert scan(f"file://{run}/step_0.pt").health == "healthy"
        with pytest.raises(UsageError, match="nothing at memory://none"):
            scan("memory://none")
        with pytest.raises(UsageError, match="cannot be reached"):
            scan("nothing://at/all")
    finally:
        memory.rm("/run", recursive=True)


MANY = 100_000


def many_safetensors(path: Path) -> None:
    header = {
        f"layers.{i}.w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [64 * i, 64 * i + 64]} for i in range(MANY)
    }
    raw = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + torch.randn(MANY * 16).numpy().tobytes())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["safetensors", pytest.param("pt", marks=pytest.mark.campaign)])
def test_a_hundred_thousand_tensors_stay_below_the_cap(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"many.{kind}"
    if kind == "pt":
        whole = torch.randn(MANY, 16)
        torch.save({f"layers.{i}.w": whole[i].clone() for i in range(MANY)}, path)
    else:
        many_safetensors(path)
    code = f"import sys; from nanproof.checkpoint import scan; r = scan(sys.argv[1]);print(r.health, len(r), {PEAK})"
    run = subprocess.run([sys.executable, "-c", code, str(path)], text=True, capture_output=True, check=True)
    health, count, peak = run.stdout.split()
    assert (health, int(count)) == ("healthy", MANY)
    assert 10 << 20 < int(peak) - bare_interpreter() <= CAP
    path.unlink()


def test_scanning_does_not_import_torch(tmp_path: Path) -> None:
    writers.series(tmp_path, "b")
    code = (
        "import sys; from nanproof.checkpoint import scan; r = scan(sys.argv[1]); assert r.health == 'corrupt';"
        "assert not {'torch', 'transformers', 'zipfile', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "step_0.pt")], check=True)
