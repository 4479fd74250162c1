"""Lint and locate speak of the same line."""

from __future__ import annotations

import json
from pathlib import Path

from nanproof.linting import lint
from nanproof.location import Location

TEXT = """import torch


def loss(x):
    first = -torch.log(torch.sigmoid(x)).mean()
    y = torch.tan(x)
    return first + y.mean()
"""


def incident(folder: Path, line: int, code: str) -> None:
    place = folder / "runs" / "a" / "incidents" / f"{line}"
    place.mkdir(parents=True)
    location = Location(
        reproduced=True,
        phase="forward",
        op="tan",
        file=str(folder / "train.py"),
        line=line,
        function="loss",
        code=(f"> {line} | {code}",),
        mechanism="pole",
        why="tan of 1.57 is infinite",
    )
    (place / "incident.json").write_text(json.dumps({"location": location.to_json()}))


def test_a_located_line_without_a_rule_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TEXT)
    incident(tmp_path, 6, "y = torch.tan(x)")
    first, second = lint(tmp_path)
    assert (first.code, second.code, second.line) == ("NP206", "NP003", 6)
    assert second.message == "located by replay, no rule: tan of 1.57 is infinite (pole)"
    assert second.help == f"nanproof locate {tmp_path / 'runs' / 'a' / 'incidents' / '6'}"
    assert [f.code for f in lint(tmp_path, ignore=["NP003"])] == ["NP206"]


def test_a_located_line_with_a_rule_is_told_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TEXT)
    incident(tmp_path, 5, "first = -torch.log(torch.sigmoid(x)).mean()")
    [found] = lint(tmp_path)
    assert found.code == "NP206"
    assert "located by replay at this line (pole)" in found.help


def test_what_is_possible_is_shown_where_it_happened_and_only_there(tmp_path: Path) -> None:
    root = "torch.sqrt(((x - {}) ** 2).mean())"
    lines = [root.format("y"), root.format("z")]
    text = f"import torch\n\n\ndef spread(x, y, z):\n    first = {lines[0]}\n    return first + {lines[1]}\n"
    (tmp_path / "train.py").write_text(text)
    assert lint(tmp_path) == ()
    incident(tmp_path, 5, f"first = {lines[0]}")
    [found] = lint(tmp_path)
    assert (found.code, found.line, found.info) == ("NP205", 5, True)
    assert "located by replay at this line (pole)" in found.help
    assert lint(tmp_path, ignore=["NP003"]) == ()


def test_a_line_that_changed_since_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TEXT.replace("torch.tan(x)", "torch.sin(x)"))
    incident(tmp_path, 6, "y = torch.tan(x)")
    (tmp_path / "runs" / "a" / "incidents" / "7").mkdir()
    (tmp_path / "runs" / "a" / "incidents" / "7" / "incident.json").write_text("[broken")
    assert [f.code for f in lint(tmp_path)] == ["NP206"]
