"""Tables in docs/ that a command measures and writes; the same markers and the same line of versions as benchmarks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from nanproof.files import write_atomic

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # where the trials are; benchmarks/ has names that would hide some of them


def write_table(page: str, name: str, text: str, packages: tuple[str, ...] = ()) -> None:
    """Put a text between its markers in docs/, under what it was measured with."""
    spec = importlib.util.spec_from_file_location("benchmarks_run", ROOT / "benchmarks" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    path = ROOT / "docs" / page
    written = run.replace(path.read_text(encoding="utf-8"), name, f"{run.machine(packages)}\n\n{text}")
    write_atomic(path, written)
    print(f"{name}: written to docs/{page}")
