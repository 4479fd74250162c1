"""Trainings of the cases that tests share, and processes that they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanproof.cases.result import Result, read_result
from nanproof.files import read_jsonl
from support.forked import run_python


def run(*words: str, expect: tuple[int, ...] = (0,), cwd: Path | None = None, given: str = "", **env: str) -> str:
    """Run ``python words…`` in a process of its own; returns everything it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | env
    if words[0] == "-m" and not given:
        done = run_python(*words, cwd=cwd, environment=environment)
        assert done.returncode in expect, done.stdout
        return done.stdout
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=cwd, capture_output=True, text=True, timeout=900, input=given
    )
    assert done.returncode in expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that has ended. Tests share it, so they only read it."""

    folder: Path
    guard: Path
    """What the guard wrote, if the run was guarded."""
    output: str

    @property
    def result(self) -> Result:
        return read_result(self.folder)

    @property
    def log(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder / "training_log.jsonl"))

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").iterdir())

    @property
    def incident(self) -> dict[str, Any]:
        """The first incident."""
        first = min((self.guard / "incidents").iterdir())
        found: dict[str, Any] = json.loads((first / "incident.json").read_text())
        return found


Train = Callable[..., Trained]
Story = Callable[[], tuple[Path, list[dict[str, Any]]]]
"""Gives the folder of the story, and of each stage whether it ended as it should and what it said."""
