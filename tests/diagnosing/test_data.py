"""Looking through training data: what is found, where, and that hostile files are reported, never fatal."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.numpy import save_file

from nanproof.cli.shell import nanproof
from nanproof.diagnosing.data import scan_data
from nanproof.errors import UsageError


def kinds(report: object) -> list[tuple[str, str, int | None]]:
    return [(p.kind, p.column, p.row) for p in report.problems]  # type: ignore[attr-defined]


def test_npy_names_the_first_bad_row_over_many_pieces(tmp_path: Path) -> None:
    x = np.zeros((300_000, 40), "f4") + np.arange(40, dtype="f4")
    x[250_003, 7] = np.nan
    x[250_004, 1] = -np.inf
    np.save(tmp_path / "x.npy", x)
    report = scan_data(tmp_path)
    assert kinds(report) == [("nonfinite", "", 250_003)]
    assert "1 NaN, 1 Inf of 12,000,000 values" in report.problems[0].message
    assert report.rows == 300_000
    assert not report.ok


def test_the_order_of_memory_does_not_matter_for_the_verdict(tmp_path: Path) -> None:
    x = np.asfortranarray(np.random.default_rng(0).normal(size=(50, 3)))
    x[4, 2] = np.inf
    np.save(tmp_path / "x.npy", x)
    report = scan_data(tmp_path / "x.npy")
    assert [p.kind for p in report.problems] == ["nonfinite"]
    assert report.problems[0].count == 1


def test_npz_members_are_columns(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "d.npz", x=np.ones((4, 2)), labels=np.array([0, 3, -100, 12]), ok=np.arange(4.0))
    report = scan_data(tmp_path, classes=10)
    assert ("label-out-of-range", "labels", 3) in kinds(report)
    assert ("constant", "x", None) in kinds(report)
    assert {p.cause for p in report.problems} == {"label-out-of-range", ""}


@pytest.mark.parametrize("label", [-100, -1, 0, 9])
def test_labels_that_losses_accept_are_fine(tmp_path: Path, label: int) -> None:
    np.savez(tmp_path / "d.npz", labels=np.array([0, 1, label]))
    assert scan_data(tmp_path, classes=10).ok


def test_minus_one_is_worth_a_word(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", y=np.array([0, 1, -1]))
    (tmp_path / "d.jsonl").write_text('{"label": 0}\n{"label": -1}\n')
    report = scan_data(tmp_path, classes=2)
    assert report.ok
    assert kinds(report) == [("ignored-label", "label", 1), ("ignored-label", "y", 2)]
    said = CliRunner().invoke(nanproof, ["diagnose", "--data", str(tmp_path / "d.jsonl")]).output
    assert "✓ 2 rows in 1 file: nothing that breaks a training; see ! above" in said


def test_a_label_column_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("x,label\n1,0\n2,9\n")
    with pytest.raises(UsageError, match=r"no column 'lable'.*did you mean label\?"):
        scan_data(tmp_path, classes=2, labels=("lable",))
    assert not scan_data(tmp_path, classes=2, labels=("label",)).ok


def test_a_negative_label_is_wrong_even_without_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", y=np.array([0, 1, -7]))
    assert kinds(scan_data(tmp_path)) == [("label-out-of-range", "y", 2)]


def test_jsonl_with_bare_nan_empty_targets_and_masked_labels(tmp_path: Path) -> None:
    rows = [
        {"x": [1.0, 2.0], "labels": [3, -100]},
        {"x": [1.0, math.nan], "labels": [1, 2]},
        {"x": [1.0], "labels": []},
        {"x": [1.0], "labels": [-100, -100]},
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    found = kinds(scan_data(tmp_path))
    assert ("nonfinite", "x", 1) in found
    assert ("empty-target", "labels", 2) in found
    assert scan_data(tmp_path).rows == 4


def test_csv_cells(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("id,x,target,note\n1,0.5,cat,\n2,nan,dog,hello\n3,,,inf\n4,1e999,cat,x\n")
    found = kinds(scan_data(tmp_path))
    assert ("nonfinite", "x", 1) in found
    assert ("empty-target", "target", 2) in found
    assert any(p.column == "x" and p.count == 2 for p in scan_data(tmp_path).problems)


def test_parquet(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, math.inf, 3.0], "label": [0, 1, 4], "text": ["a", "b", "c"]})
    pq.write_table(table, tmp_path / "d.parquet")
    found = kinds(scan_data(tmp_path, classes=4))
    assert found == [("nonfinite", "x", 1), ("label-out-of-range", "label", 2)]


@pytest.mark.parametrize(
    ("row", "needed"),
    [
        ({"input_length": 4, "labels": [1, 2, 2, 3]}, 5),  # a repeat needs a blank between
        ({"input_length": 2, "labels": [1, 2, 3]}, 3),
        ({"num_frames": 10, "target_length": 11}, 11),
        ({"num_frames": 5, "text": "abacad"}, 6),
        ({"num_frames": 6, "text": "abacad"}, None),
        ({"input_length": 5, "labels": [1, 2, 2, 3]}, None),
        ({"input_length": 3, "labels": [1, 2, 3]}, None),
    ],
)
def test_ctc_lengths_agree_with_torch(tmp_path: Path, row: dict[str, object], needed: int | None) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    found = [p for p in scan_data(tmp_path).problems if p.kind == "ctc-infeasible"]
    assert bool(found) == (needed is not None)
    if needed is not None:
        assert f"needs {needed} steps" in found[0].message
    labels, steps = row.get("labels"), row.get("input_length")
    if labels is not None:  # torch is the judge
        torch.manual_seed(0)
        loss = torch.nn.functional.ctc_loss(
            torch.randn(steps, 1, 5).log_softmax(-1), torch.tensor([labels]), [steps], [len(labels)]
        )
        assert bool(torch.isinf(loss)) == bool(found)


def test_ctc_counts_the_steps_that_are_left_after_downsampling(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"input_length": 12, "labels": [1, 2, 3, 4]}))
    assert scan_data(tmp_path).ok
    assert not scan_data(tmp_path, downsample=4).ok


@pytest.mark.parametrize(("box", "bad"), [([1, 1, 5, 1], True), ([4, 4, 2, 8], True), ([1, 1, 5, 6], False)])
def test_boxes_without_area(tmp_path: Path, box: list[int], bad: bool) -> None:
    rows = [{"boxes": [[0, 0, 3, 4], [2, 2, 9, 9]]}] * 20 + [{"boxes": [box]}]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    found = [p for p in scan_data(tmp_path).problems if p.kind == "degenerate-box"]
    assert bool(found) == bad
    if bad:
        assert found[0].row == 20


def test_tensors(tmp_path: Path) -> None:
    save_file({"x": np.array([[1.0], [np.nan]], "f4")}, str(tmp_path / "a.safetensors"))
    torch.save({"y": torch.tensor([1.0, torch.inf])}, tmp_path / "b.pt")
    found = kinds(scan_data(tmp_path))
    assert found == [("nonfinite", "x", 1), ("nonfinite", "y", 1)]


def test_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(tmp_path / "good.png")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "blank.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:60])
    (tmp_path / "no.jpg").write_bytes(b"hello")
    report = scan_data(tmp_path)
    assert sorted((p.kind, p.file) for p in report.problems) == [
        ("constant", "blank.png"),
        ("unreadable", "cut.png"),
        ("unreadable", "no.jpg"),
    ]


def test_large_values_are_told_unless_they_are_identifiers(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([1.0, 7e4]), image_id=np.array([1, 10**9]))
    assert kinds(scan_data(tmp_path)) == [("out-of-range", "x", None)]
    assert scan_data(tmp_path).ok


def test_pickled_objects_are_never_opened(tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    np.save(tmp_path / "x.npy", np.array([Canary()], object), allow_pickle=True)
    report = scan_data(tmp_path)
    assert [p.kind for p in report.problems] == ["unreadable"]
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", np.arange(1000.0))
    whole = (tmp_path / "whole.npy").read_bytes()
    np.savez(tmp_path / "whole.npz", a=np.arange(100.0))
    archive = (tmp_path / "whole.npz").read_bytes()
    rng = random.Random(0)
    for n in range(60):
        (tmp_path / f"{n}.npy").write_bytes(whole[: rng.randrange(len(whole))])
        flipped = bytearray(archive)
        for _ in range(8):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        (tmp_path / f"{n}.npz").write_bytes(bytes(flipped))
        for suffix in ("csv", "jsonl", "parquet", "png"):
            (tmp_path / f"{n}.{suffix}").write_bytes(rng.randbytes(rng.randrange(2000)))
    report = scan_data(tmp_path)
    unreadable = {p.file for p in report.problems if p.kind == "unreadable"}
    assert all(f"{n}.npy" in unreadable for n in range(60) if f"{n}.npy" != "whole.npy")
    assert all(f"{n}.parquet" in unreadable and f"{n}.png" in unreadable for n in range(60))


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """100 MB of array through a child that may not hold 60 MB more than it needs to start."""
    np.save(tmp_path / "x.npy", np.ones((25_000_000,), "f4"))
    code = (
        "import resource, sys; from nanproof.diagnosing.data import scan_data\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"r = scan_data({str(tmp_path)!r})\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert r.rows == 25_000_000 and 'torch' not in sys.modules\n"
        "assert after - before < 60_000, after - before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        scan_data(tmp_path / "nothing")
    (tmp_path / "a.xyz").write_text("?")
    report = scan_data(tmp_path)
    assert not report.ok
    assert any("no data found" in n for n in report.notes)
    assert any("1 files not read (.xyz)" in n for n in report.notes)
    with pytest.raises(UsageError, match="no data that nanproof reads"):
        scan_data(tmp_path / "a.xyz")


def verb(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanproof", "diagnose", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


def test_the_verb_names_file_and_row_and_weighs_it_as_evidence(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([1.0, 2.0, np.nan]), labels=np.array([0, 1, 2]))
    done = verb("--data", "d.npz", "--classes", "3", cwd=tmp_path)
    assert done.returncode == 1
    assert "d.npz row 2, x: 1 NaN of 3 values, first in row 2" in done.stdout
    told = json.loads(verb("--data", "d.npz", "--fact", "loss=nan", "--json", cwd=tmp_path).stdout)
    assert told["causes"][0]["name"] == "bad-data"
    assert any("first in row 2" in words for words in told["causes"][0]["evidence"])
    np.savez(tmp_path / "d.npz", x=np.array([1.0, 2.0, 3.0]))
    done = verb("--data", "d.npz", cwd=tmp_path)
    assert (done.returncode, "3 rows in 1 file: no problems found" in done.stdout) == (0, True)


MODEL = """
import torch
from torch import nn

class Gated(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(value))
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x) * self.alpha

def good(): return Gated(0.01)
def bad(): return Gated(float("nan"))
def batch(): return torch.ones(2, 4)
"""


def test_a_fresh_model_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fresh.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)

    def look(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(nanproof, ["diagnose", "--model", *arguments])
        return done.exit_code, done.output

    code, said = look("fresh.py:good", "--batch", "fresh.py:batch", "--watch-params", "alpha*")
    assert code == 0, said
    assert "alpha 0.01 → 0.01" in said
    assert "layers compute in float32" in said
    code, said = look("fresh.py:bad", "--batch", "fresh.py:batch")
    assert (code, "alpha [] float32: 1 NaN" in said) == (1, True)
    code, said = look("fresh.py:good")
    assert (code, "add --batch" in said) == (2, True)


def test_boxes_without_area_in_each_layout_of_detection(tmp_path: Path) -> None:
    voc, yolo = tmp_path / "Annotations", tmp_path / "labels"
    voc.mkdir()
    yolo.mkdir()
    box = "<object><bndbox><xmin>{}</xmin><ymin>1</ymin><xmax>9</xmax><ymax>8</ymax></bndbox></object>"
    (voc / "a.xml").write_text(f"<annotation>{box.format(2)}{box.format(9)}</annotation>")
    (voc / "empty.xml").write_text("<annotation></annotation>")
    (yolo / "a.txt").write_text("0 0.5 0.5 0.1 0.1\n1 0.5 0.5 0.1 0.0\n")
    (yolo / "none.txt").write_text("")
    coco = {"images": [], "annotations": [{"image_id": 1, "category_id": 1, "bbox": [3, 3, 0, 7]}]}
    (tmp_path / "instances.json").write_text(json.dumps(coco))
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    found = {(p.file, p.kind, p.row) for p in scan_data(tmp_path).problems if p.cause}
    assert found == {
        ("Annotations/a.xml", "degenerate-box", 1),
        ("labels/a.txt", "degenerate-box", 1),
        ("instances.json", "degenerate-box", 0),
    }


@pytest.mark.parametrize(
    ("name", "rows", "told"),
    [
        ("sft.jsonl", [{"instruction": "a", "input": "", "output": w} for w in ("x", "", "y")], "row 1, output"),
        (
            "chat.jsonl",
            [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": w}]} for w in ("a", " ")],
            "row 1, messages: every answer is empty",
        ),
        ("chat.jsonl", [{"conversations": [{"from": "human", "value": "q"}]}], "holds no answer"),
        (
            "manifest.json",
            [{"duration": d, "text": "a long transcript"} for d in (3.0, 0.05)],
            "row 1, text: the target needs 17 steps, 0.05 s give 5",
        ),
        ("alpaca.json", [{"instruction": "a", "output": w} for w in ("x", "")], "row 1, output"),
        ("cls.jsonl", [{"label": 12 if i == 7 else i % 3} for i in range(60)], "label 12 is far from the others"),
    ],
)
def test_samples_without_an_answer(tmp_path: Path, name: str, rows: list[dict[str, object]], told: str) -> None:
    path = tmp_path / name
    listed = json.dumps(rows) if name == "alpaca.json" else "".join(f"{json.dumps(r)}\n" for r in rows)
    path.write_text(listed)
    [problem] = scan_data(path).problems
    assert told in str(problem)
    assert bool(problem.cause) == (name != "cls.jsonl")


def test_conversations_and_labels_in_order(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "data.jsonl"
    rows = ({"messages": turns, "label": i % 40, "duration": 2.5 + i} for i in range(80))
    path.write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    assert scan_data(path).problems == ()
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"lr": 0.1, "labels": [1, 2]}, indent=1))
    assert "not read (.json)" in scan_data(tmp_path).notes[0]
