"""The short part of `make chaos`, tier C, and the campaign's own checks: it notices what it looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.reader import open_code
from chaos.rubbish import KINDS, Piece, feed, hostile_configs, run

pytestmark = pytest.mark.slow

SOME = {"checkpoint": 150, "log": 80, "config": 80, "code": 80, "request": 60}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_crashes_runs_or_is_called_clean(tmp_path: Path, kind: str) -> None:
    score = run(kind, tmp_path / kind, 1, SOME[kind])
    assert score.opened >= SOME[kind]
    assert score.wrong == []


def test_a_false_clean_and_a_crash_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("iter 1: loss 2.5\n")
    good = Piece(kind="log", name="good", path=tmp_path / "a.log", bad=True)
    gone = Piece(kind="no such kind", name="gone", path=tmp_path / "a.log", bad=True)
    score = feed([good, gone], tmp_path, tmp_path / "canary")
    assert score.false_clean == ["good"]
    assert score.crashes == ["gone: KeyError: 'no such kind'"]


def test_the_canary_sings_where_configs_are_trusted(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    data = hostile_configs(canary)["apply.yaml"]
    code = "import sys, yaml; yaml.unsafe_load(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-c", code], input=data, check=True)
    assert canary.exists()


FRAGMENTS = (
    "import torch\n",
    "from torch import nn\n",
    "loss.backward()\n",
    "optimizer.step()\n",
    "if torch.isnan(loss):\n",
    "    continue\n",
    "    ",
    "\t",
    "loss = x / x.norm()\n",
    "torch.log(torch.softmax(x, 0))",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "lambda: ",
    "*",
    "**",
    ":=",
    "f'{",
    "}'",
    "'",
    '"""',
    "\\",
    "\n",
    "\r",
    "\x0c",
    "#",
    "# nanproof: ignore",
    "match x:\n",
    "async def f():\n",
    "class A(nn.Module):\n",
    "    def forward(self, x):\n",
    "        return x.mean()\n",
    "@",
    "é",
    "\ufeff",
    "scaler.scale(loss).backward()\n",
    "with torch.autocast('cuda'):\n",
    "for x in y:\n",
    "yield",
    "0x",
    "1e999",
    "...",
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40))
def test_code_put_together_at_random(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    """No rule fails on it, and what Python cannot parse is said not to be linted."""
    folder = tmp_path_factory.getbasetemp() / "random"  # not beside the folders of other tests: configs look around
    folder.mkdir(exist_ok=True)
    file = folder / "random.py"
    file.write_text("import torch\n" + "".join(parts), newline="")
    assert open_code(str(file)) == "not clean"
