"""Processes that start at once: forked from one that has loaded torch and run nothing of it."""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOAD = ["torch.distributed.fsdp", "nanproof.guard.guard", "nanproof.run.session", "nanproof.cases.program"]


def context() -> ForkServerContext:
    """How tests start such processes."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(PRELOAD)
    return found


def run_module(
    module: str, words: tuple[str, ...], *, cwd: Path | None, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """What ``python -m module words…`` prints and ends with."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        process = context().Process(target=_be, args=(module, words, str(cwd or Path.cwd()), environment, str(said)))
        process.start()
        process.join(timeout=900)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(module, 900)
        return subprocess.CompletedProcess([module, *words], process.exitcode, said.read_text(), "")


def _be(module: str, words: tuple[str, ...], cwd: str, environment: dict[str, str], said: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    fd = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    code: object = 1
    try:
        sys.argv, sys.orig_argv = [module, *words], [sys.executable, "-m", module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = 0 if leaving.code is None else leaving.code
    except BaseException:
        traceback.print_exc()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
