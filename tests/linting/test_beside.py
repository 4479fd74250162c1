"""A repaired copy beside the original: both run, each with its own modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanproof import errors, journal
from nanproof.linting.beside import copies
from nanproof.linting.inspection import Inspection

LOSSES = "WORD = 'original'\n"
COPY = b"WORD = 'repaired'\n"


def plant(home: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return sorted(home.rglob("*.py"))


def run(home: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=home, capture_output=True, text=True, timeout=600, check=True
    )
    return done.stdout.strip()


IMPORTS = {
    "plain": "import losses\nprint(losses.WORD)\n",
    "renamed": "import os, losses as L\nprint(L.WORD)\n",
    "from": "from losses import WORD\nprint(WORD)\n",
    "from-renamed": "from losses import (\n    WORD as W,  # why\n)\nprint(W)\n",
    "inside": "def f():\n    from losses import WORD\n    return WORD\nprint(f())\n",
    "dotted": "import pkg.losses\nprint(pkg.losses.WORD)\n",
    "dotted-renamed": "import pkg.losses as L\nprint(L.WORD)\n",
    "from-package": "from pkg import losses\nprint(losses.WORD)\n",
    "from-package-renamed": "from pkg import other, losses as L\nprint(L.WORD)\n",
    "from-dotted": "from pkg.losses import WORD\nprint(WORD)\n",
    "deep": "from pkg.deep import word\nprint(word())\n",
    "reexport": "from pkg2 import WORD\nprint(WORD)\n",
    "reexport-and-module": "from pkg2 import WORD, losses\nprint(losses.WORD if WORD == losses.WORD else 'mixed')\n",
    "package": "import pkg2\nprint(pkg2.WORD)\n",
}
TREE = {
    "losses.py": LOSSES,
    "pkg/__init__.py": "",
    "pkg/losses.py": LOSSES,
    "pkg/other.py": "",
    "pkg/deep/__init__.py": "from ..losses import WORD\n\ndef word():\n    from .. import losses as L\n"
    "    from ..losses import WORD as W\n    return W if L.WORD == W == WORD else 'mixed'\n",
    "pkg2/__init__.py": "from .losses import WORD\nfrom . import losses\n",
    "pkg2/losses.py": LOSSES,
}


@pytest.mark.parametrize("kind", IMPORTS)
def test_imports_among_copies_lead_to_copies(tmp_path: Path, kind: str) -> None:
    paths = plant(tmp_path, {**TREE, "train.py": IMPORTS[kind]})
    changed = {p: COPY for p in paths if p.name == "losses.py"}
    made = copies(changed, paths)
    assert tmp_path / "train_stable.py" in made
    assert not set(made) & set(paths)
    for path, data in made.items():
        path.write_bytes(data)
    assert run(tmp_path, "train.py") == "original"
    assert run(tmp_path, "train_stable.py") == "repaired"


def test_only_what_imports_it_is_copied(tmp_path: Path) -> None:
    paths = plant(
        tmp_path,
        {
            "losses.py": LOSSES,
            "train.py": "import losses\n",
            "eval.py": "import os\n",
            "tests/test_losses.py": "import losses\n",
            "test_more.py": "import losses\n",
        },
    )
    made = copies({tmp_path / "losses.py": COPY}, paths)
    assert sorted(p.name for p in made) == ["losses_stable.py", "train_stable.py"]


def test_a_notebook_is_copied_and_redirected(tmp_path: Path) -> None:
    paths = plant(tmp_path, {"losses.py": LOSSES})
    raw = b'{"cells": [{"cell_type": "code", "source": ["%time\\n", "import losses\\n", "x = 1"]}], "nbformat": 4}'
    (tmp_path / "a.ipynb").write_bytes(raw)
    made = copies({tmp_path / "losses.py": COPY}, [*paths, tmp_path / "a.ipynb"])
    assert made[tmp_path / "a_stable.ipynb"] == raw.replace(b"import losses", b"import losses_stable as losses")


def test_line_ends_and_comments_survive_redirection(tmp_path: Path) -> None:
    paths = plant(tmp_path, {"losses.py": LOSSES})
    (tmp_path / "train.py").write_bytes("\ufefffrom losses import WORD  # größe\r\n".encode())
    made = copies({tmp_path / "losses.py": COPY}, [*paths, tmp_path / "train.py"])
    assert made[tmp_path / "train_stable.py"] == "\ufefffrom losses_stable import WORD  # größe\r\n".encode()


UNSTABLE = "import torch\n\n\ndef loss(x):\n    return -torch.log(torch.sigmoid(x)).mean()\n"
TRAIN = "import torch\nfrom model.losses import loss\n\nprint(bool(torch.isfinite(loss(torch.tensor([-200.0])))))\n"


def test_both_can_be_run_and_compared(tmp_path: Path) -> None:
    """The original overflows, its repaired copy does not, and undoing removes the copies."""
    plant(tmp_path, {"model/losses.py": UNSTABLE, "train.py": TRAIN})
    inspection = Inspection([tmp_path])
    fixed = [f for _, f in inspection.fix(unsafe=False) if f is not None]
    outcome = inspection.apply_beside(fixed)
    assert all(r.verified for r in outcome.repairs)
    assert {Path(t.path).name for t in outcome.application.files} == {"losses_stable.py", "train_stable.py"}
    assert (tmp_path / "model" / "losses.py").read_text() == UNSTABLE
    both = "import runpy, sys; sys.path.insert(0, ''); [runpy.run_path(p) for p in ('train.py', 'train_stable.py')]"
    assert run(tmp_path, "-c", both).split() == ["False", "True"]
    with pytest.raises(errors.UsageError, match=r"losses_stable\.py exists already; nothing was written"):
        inspection.apply_beside(fixed)
    journal.undo(tmp_path)
    assert {p.name for p in tmp_path.rglob("*.py")} == {"losses.py", "train.py"}
