"""A smoke test leaves the user's files alone, and judges what the optimizer gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run.launch import nanproof

pytestmark = pytest.mark.slow

SCRIPT = """
import json, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
log = open("train.jsonl", "w")
for step in range(100):
    loss = 1e5 * model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(json.dumps({"step": step, "loss": loss.item()}), file=log, flush=True)
"""


def test_a_log_that_the_script_opens_anew_is_put_back_and_clipped_gradients_pass(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "loss": NaN}\n')
    before = (tmp_path / "train.jsonl").read_bytes()
    done = nanproof("smoke", "train.py", "--steps", "4", "--json", check=False, fresh=False, cwd=tmp_path)
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert (tmp_path / "train.jsonl").read_bytes() == before
    assert "train.jsonl: overwritten by the script, put back" in checks["your files"]["reason"]
    norms = checks["gradient norms"]
    assert norms["result"] == "PASS", norms  # 1e5 times too large before the script's own clipping
    assert norms["reason"].startswith("1 to 1 after clipping (")
