"""Runs scripts under the guard: within this process when only torch is needed, else as a user would."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nanproof.files import read_jsonl
from nanproof.run.launcher import Outcome, run_program
from nanproof.run.options import Options
from nanproof.run.program import Program
from support.forked import run_python

SCRIPTS = Path(__file__).parents[1] / "scripts"


def skip_without_its_libraries(script: str) -> None:
    """Skip the test where a trainer that the script uses is not installed: under an older torch, say."""
    for node in ast.walk(ast.parse((SCRIPTS / script).read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for name in names:
            top = name.partition(".")[0]
            if importlib.util.find_spec(top) is None and not (SCRIPTS / f"{top}.py").exists():
                pytest.skip(f"{top} is not installed")


@dataclass(frozen=True)
class Ran:
    """A guarded run: how it ended, the script's own variables, and what was written."""

    outcome: Outcome
    main: dict[str, Any]
    run_dir: Path

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return incidents(self.run_dir)

    @property
    def log(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.run_dir / "training_log.jsonl"))


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted(run_dir.glob("incidents/*/incident.json"))]


@contextmanager
def as_before() -> Iterator[None]:
    """A block after which the interpreter's own main program is back."""
    argv, path, main = sys.argv, sys.path[:], sys.modules["__main__"]
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main


def guarded(tmp_path: Path, source: str, *arguments: str, name: str = "script", **options: Any) -> Ran:
    """Run source code under the guard in this process."""
    script = tmp_path / f"{name}.py"
    script.write_text(textwrap.dedent(source))
    return run_guarded(str(script), tmp_path / f"{name}.run", *arguments, **options)


def run_guarded(script: str, run_dir: Path, *arguments: str, **options: Any) -> Ran:
    """A script of the folder under the guard in this process."""
    with as_before():
        program = Program(target=str(SCRIPTS / script), arguments=arguments)
        outcome = run_program(program, Options(run_dir=run_dir, run_dir_given=True, **options))
        return Ran(outcome, dict(vars(sys.modules["__main__"])), run_dir)


def plain(tmp_path: Path, source: str, *arguments: str, name: str = "plain") -> dict[str, Any]:
    """Run the same without anything of ours."""
    script = tmp_path / f"{name}.py"
    script.write_text(textwrap.dedent(source))
    with as_before():
        sys.argv = [str(script), *arguments]
        return runpy.run_path(str(script), run_name="__main__")


def run_bare(script: str, *arguments: str) -> dict[str, Any]:
    """The globals of a script of the folder, after it ran within this process as plain python runs it."""
    with as_before():
        sys.argv = [script, *arguments]
        return runpy.run_path(str(SCRIPTS / script), run_name="__main__")


def fork_ranks(work: Callable[[], object]) -> None:
    """Do something on two ranks, forked: a reference needs no torchrun, and torch is loaded already."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [_fork_rank(work, rank, port) for rank in (0, 1)]
    assert [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks] == [0, 0]


def _fork_rank(work: Callable[[], object], rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        kept = work()  # noqa: F841  a DDP model that is freed joins threads of gloo, which may wait for the GIL
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def nanproof(
    *words: str | Path, check: bool = True, fresh: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own; not ``fresh``, in one that has loaded torch and starts at once."""
    command = [sys.executable, "-m", "nanproof", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    if fresh:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, env=environment, **options
        )
    else:
        done = run_python(*command[1:], environment=environment, apart=True, **options)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def different(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two nested states differ, bit by bit."""
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [where]
    if isinstance(a, dict):
        if set(a) != set(b):
            return [f"{where}: {set(a) ^ set(b)}"]
        return [d for k in a for d in different(a[k], b[k], f"{where}.{k}")]
    if isinstance(a, list | tuple):
        pairs = zip(a, b, strict=True)
        return [d for i, (x, y) in enumerate(pairs) for d in different(x, y, f"{where}.{i}")]
    return [] if a == b or callable(a) else [where]


def is_finite(state: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return bool(torch.isfinite(state).all()) if state.is_floating_point() else True
    if isinstance(state, dict | list | tuple):
        return all(is_finite(v) for v in (state.values() if isinstance(state, dict) else state))
    return True
