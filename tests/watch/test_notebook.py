"""Records and a live chart in a real notebook."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
    chart, verdict, incident, scan, diagnosis = shown
    assert "<polyline" in chart  # the first cell's output was redrawn while the second one trained
    assert "NaN 8" in chart
    assert "1 incidents" in chart
    assert "step 8: nonfinite" in verdict
    assert "step 8: nonfinite" in incident
    assert "skip" in incident
    assert "corrupt" in scan
    assert "<table" in diagnosis
    assert not any("<script" in text for text in shown)
