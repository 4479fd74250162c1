"""Processes that start at once: forked from one that has loaded torch and run nothing of it."""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOAD = [
    "torch.distributed.fsdp",
    "torch._dynamo",
    "nanproof.guard.guard",
    "nanproof.run.session",
    "nanproof.cases.program",
]


def context() -> ForkServerContext:
    """How tests start such processes."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(PRELOAD)
    return found


def run_python(
    *words: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None, apart: bool = False
) -> subprocess.CompletedProcess[str]:
    """What ``python words…`` prints and ends with: ``-m module …``, ``-c code …`` or ``script.py …``.

    Both streams are in stdout, in their order; with ``apart`` each is in its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        said, errors = Path(folder) / "said", Path(folder) / "errors"
        said.touch()
        errors.touch()
        streams = (str(said), str(errors if apart else said))
        given = (words, str(cwd or Path.cwd()), dict(environment or os.environ), *streams)
        process = context().Process(target=_be, args=given)
        process.start()
        process.join(timeout=900)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, 900)
        texts = (stream.read_text("utf-8", "surrogateescape") for stream in (said, errors))
        return subprocess.CompletedProcess(words, process.exitcode, *texts)


def _be(words: tuple[str, ...], cwd: str, environment: dict[str, str], said: str, errors: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for stream, path in ((1, said), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    code: object = 1
    try:
        sys.orig_argv = [sys.executable, *words]
        if words[0] in ("-m", "-c"):
            sys.argv = [words[0], *words[2:]]
            sys.path.insert(0, cwd)
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(cwd, words[0]).parent))  # absolute: finders keep what they saw in "."
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = 0 if leaving.code is None else leaving.code
    except BaseException:
        traceback.print_exc()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
