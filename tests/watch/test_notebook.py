"""Records and a live chart in a real notebook."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

CELLS = [
    """
import torch, nanproof
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir="run")
live = nanproof.watch(guard)
live
""",
    """
for step in range(12):
    x = torch.full((2, 4), float("nan")) if step == 7 else torch.randn(2, 4)
    verdict = guard.step(lambda: model(x).square().mean())
    bad = verdict if not verdict.ok else globals().get("bad")
live.draw()
guard.close()
bad
""",
    "import json, pathlib; from nanproof import Incident\n"
    "Incident.from_json(json.loads(next(pathlib.Path('run/incidents').glob('*/incident.json')).read_text()))",
    "torch.save({'w': torch.tensor([1.0, float('nan')])}, 'a.pt'); nanproof.scan('a.pt')",
    "nanproof.diagnose('run')",
    """
from nanproof.cure.change import Change
from nanproof.cure.outcome import Line, Outcome
rest = dict(why="", steps=9, metrics=(), cost=1.0, step_seconds=0.1, skipped=0, trials=())
original = Line(change=Change(name="original <b>", kind="original", why="", size=0), standing="died", died_at=7,
                loss=float("nan"), **rest)
lower = Line(change=Change(name="lr 1e-4", kind="rate", why="", size=1), standing="cured", died_at=None, loss=0.5,
             **rest)
Outcome(answer="cured", healthy=False, command="python train.py", died_at=7, why="pole in log at train.py:3",
        lines=(original, lower), winner="lr 1e-4", trials=2, seconds=1.0, seeds=(0,), schedule=None, horizon=None,
        remedy="python train.py --lr 1e-4")
""",
    "import json, pathlib; from nanproof import Incident\n"
    "Incident.from_json(json.loads(next(pathlib.Path('run/incidents').glob('*/incident.json')).read_text())).location",
]


def test_a_notebook_shows_verdicts_incidents_scans_and_a_live_chart(tmp_path: Path) -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    env = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    client = nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=env)
    shown = [
        "".join(o["data"]["text/html"] for o in cell.outputs if "text/html" in o.get("data", {})) for cell in book.cells
    ]
    chart, verdict, incident, scan, diagnosis, cure, location = shown
    assert "<polyline" in chart  # the first cell's output was redrawn while the second one trained
    assert "NaN 8" in chart
    assert "1 incident<" in chart
    assert [o.output_type for o in book.cells[0].outputs] == ["display_data"]  # no repr below it
    assert "step 8: nonfinite" in verdict
    assert "step 8: nonfinite" in incident
    assert "skip" in incident
    assert "corrupt" in scan
    assert "<table" in diagnosis
    assert "cured by lr 1e-4" in cure
    assert "<td" in cure
    assert "original &lt;b&gt;" in cure
    assert "verdict = guard.step" in location  # the code around the line
    assert not any("<script" in text for text in shown)
