"""A series: its order, where it turned, and how little of it bisection reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from checkpoint import writers
from nanproof.checkpoint import scan, scan_series
from nanproof.checkpoint.layout import discover
from nanproof.checkpoint.report import ScanReport
from nanproof.checkpoint.scan import scan_checkpoint
from nanproof.checkpoint.series import bisect
from nanproof.errors import UsageError


def test_order_is_by_step_not_by_spelling(tmp_path: Path) -> None:
    for step in (9, 10, 100, 2000):
        torch.save({"w": torch.randn(4, 4)}, tmp_path / f"step_{step}.pt")
    assert [r.step for r in scan_series(tmp_path)] == [9, 10, 100, 2000]
    assert [r.name for r in scan_series(str(tmp_path / "step_?0*.pt"))] == ["step_10.pt", "step_100.pt", "step_2000.pt"]


@pytest.mark.parametrize(
    ("healths", "last", "first"),
    [
        ("hhhbpp", "step_2.pt", "step_3.pt"),
        ("bbb", None, "step_0.pt"),
        ("hhh", "step_2.pt", None),
        ("hbh", "step_2.pt", "step_1.pt"),
        ("hhd", "step_1.pt", "step_2.pt"),
    ],
)
def test_last_healthy_and_first_bad(healths: str, last: str | None, first: str | None, tmp_path: Path) -> None:
    series = scan_series(writers.series(tmp_path, healths))
    assert (series.last_healthy, series.first_bad) == (last, first)
    assert series.ok == (set(healths) == {"h"})


@pytest.mark.parametrize("good", [0, 1, 31, 63, 64])
def test_bisect_reads_the_logarithm_and_finds_the_same(good: int, tmp_path: Path) -> None:
    source = writers.series(tmp_path / "source", "hb")
    folder = tmp_path / "run"
    folder.mkdir()
    for i in range(64):
        shutil.copy(source / ("step_0.pt" if i < good else "step_1.pt"), folder / f"step_{i}.pt")
    read: list[str] = []

    def counted(checkpoint: object) -> ScanReport:
        report = scan_checkpoint(checkpoint)  # type: ignore[arg-type]
        read.append(report.name)
        return report

    found = bisect(discover([folder]), counted)
    assert len(read) == len(set(read)) == len(found.reports) <= 7
    assert found.total == 64
    assert found.first_bad == (f"step_{good}.pt" if good < 64 else None)
    assert found.last_healthy == (f"step_{good - 1}.pt" if good else None)


def test_bisect_wants_one_series(tmp_path: Path) -> None:
    writers.series(tmp_path, "h")
    torch.save({}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"one series, here are several.*Next: name one"):
        bisect(discover([tmp_path]), scan_checkpoint)


def test_scan_takes_one_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds 2 checkpoints"):
        scan(writers.series(tmp_path, "hh"))
    with pytest.raises(UsageError, match="there is nothing at"):
        scan(tmp_path / "none")


def test_a_final_model_beside_its_checkpoints(tmp_path: Path) -> None:
    """The HF Trainer leaves the final model in the folder that holds checkpoint-N."""
    from safetensors.torch import save_file

    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-5", tmp_path / "out" / "checkpoint-10"):
        folder.mkdir()
        save_file({"w": torch.randn(4, 4)}, folder / "model.safetensors")
    assert [(r.name, len(r)) for r in scan_series(tmp_path / "out")] == [
        ("out", 1),
        ("checkpoint-5", 1),
        ("checkpoint-10", 1),
    ]


def test_temporaries_and_quarantine_are_passed_over(tmp_path: Path) -> None:
    writers.series(tmp_path, "h")
    torch.save({}, tmp_path / ".step_1.pt.123.tmp")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "quarantine.jsonl").write_text("")
    torch.save({}, tmp_path / "bad" / "x.pt")
    assert [r.name for r in scan_series(tmp_path)] == ["step_0.pt"]
