"""Under torchrun, over fsspec, and within the memory cap."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The ranges asked for of files below ``memory://far``."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    ranges: list[tuple[int, int]] = []
    original = type(memory).cat_file

    def cat_file(self: Any, path: str, start: Any = None, end: Any = None, **words: Any) -> bytes:
        ranges.append((start, end))
        return bytes(original(self, path, start=start, end=end, **words))

    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    yield ranges
    memory.rm("/far", recursive=True)


def far(path: Path) -> str:
    """The address of a copy of a file or folder in memory."""
    import fsspec

    memory = fsspec.filesystem("memory")
    for file in [path] if path.is_file() else path.iterdir():
        memory.pipe(f"/far/{file.relative_to(path.parent)}", file.read_bytes())
    return f"memory://far/{path.name}"


def large(path: Path, bad: int = -1) -> list[tuple[int, int, bytes]]:
    """A torch zip above the size that comes whole; where its members' headers stand, and its bytes."""
    import zipfile

    state = {f"layers.{i}.weight": torch.randn(1000, 300 + i) for i in range(12)}
    if bad >= 0:
        state[f"layers.{bad}.weight"][3, 4] = float("nan")
    torch.save(state, path)
    with zipfile.ZipFile(path) as archive:
        return [(i.header_offset, i.file_size, i.filename.encode()) for i in archive.infolist()]


@pytest.mark.parametrize("fast", [False, True])
def test_headers_come_along_with_what_they_stand_in_front_of(tmp_path: Path, asked: list[Any], fast: bool) -> None:
    large(tmp_path / "model.pt", bad=7)
    report = scan(far(tmp_path / "model.pt"), fast=fast)
    assert (report.health, [t.name for t in report if t.bad]) == ("corrupt", ["layers.7.weight"])
    sizes = [end - start for start, end in asked]
    assert sizes.count(1 << 18) == 2  # the beginning and the end
    assert len(sizes) <= 2 + 12 + 2  # a range for each tensor, and two closer looks at the bad one
    alone = scan(tmp_path / "model.pt", fast=fast)
    assert (alone.reasons, alone.tensors) == (report.reasons, report.tensors)


def test_a_header_that_lies_is_found_after_its_bytes_were_read(tmp_path: Path, asked: list[Any]) -> None:
    path = tmp_path / "model.pt"
    for at, change in ((4, b"\1"), (14, b"\1\2\3\4"), (26, b"\7"), (30, b"A"), (18, b"\1\0\0\0")):
        headers = large(path)
        data = bytearray(path.read_bytes())
        data[headers[6][0] + at : headers[6][0] + at + len(change)] = change
        path.write_bytes(data)
        near, away = scan(path), scan(far(path))
        assert (near.health, near.reasons) == (away.health, away.reasons), at
        assert (near.health == "healthy") == (at == 4)  # the version that is needed to read it says nothing


@pytest.mark.parametrize("gap", [64, 100, 4096])
def test_members_that_are_not_where_torch_puts_them_are_found_all_the_same(
    tmp_path: Path, asked: list[Any], gap: int
) -> None:
    """Bytes between two members move where the first one's seem to begin, and a NaN into or out of what is read."""
    path = tmp_path / "model.pt"
    headers = large(path, bad=5)
    data = path.read_bytes()
    cut = headers[9][0]
    data = bytearray(data[:cut] + bytes(gap) + data[cut:])
    at = len(data) - 22
    start = int.from_bytes(data[at + 16 : at + 20], "little") + gap
    data[at + 16 : at + 20] = start.to_bytes(4, "little")
    wide = data.rindex(b"PK\6\6")
    data[wide + 48 : wide + 56] = start.to_bytes(8, "little")
    locator = data.rindex(b"PK\6\7")
    data[locator + 8 : locator + 16] = wide.to_bytes(8, "little")
    for i, (header, _, name) in enumerate(headers):
        if header >= cut:
            entry = data.index(b"PK\1\2", start)
            while data[entry + 46 : entry + 46 + len(name)] != name:
                entry = data.index(b"PK\1\2", entry + 4)
            data[entry + 42 : entry + 46] = (header + gap).to_bytes(4, "little")
            assert i >= 9
    path.write_bytes(data)
    near, away = scan(path), scan(far(path))
    assert near.health == "corrupt"
    assert (near.reasons, near.tensors) == (away.reasons, away.tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_far_away_costs_few_ranges(tmp_path: Path, asked: list[Any]) -> None:
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {f"layers.{i}.weight": torch.randn(600, 600) for i in range(20)}
    state["layers.3.weight"][5, 5] = float("inf")
    dcp.save(state | {"step": 7, "small": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    report = scan(far(tmp_path / "dcp"))
    assert (report.health, [t.name for t in report if t.bad]) == ("corrupt", ["layers.3.weight"])
    assert len(asked) <= 2 * 22 + 4
