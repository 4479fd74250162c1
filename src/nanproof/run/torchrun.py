"""Several processes: the command that lets torchrun start `nanproof run` in each of them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import GuardStop, UsageError
from ..files import file_text
from ..text import show
from .command import wait_for


def torchrun_command(words: Sequence[str], *, nproc: int, nnodes: int, rendezvous: str | None) -> list[str]:
    """The command line for ``nproc`` processes on each of ``nnodes`` machines; ``words`` come after `nanproof run`.

    >>> torchrun_command(["train.py"], nproc=2, nnodes=1, rendezvous=None)[1:]
    ['-m', 'nanproof.run.torchrun', '--standalone', '--nproc-per-node=2', '-m', 'nanproof', 'run', 'train.py']
    """
    if nnodes > 1 and rendezvous is None:
        raise UsageError(
            f"--nnodes {nnodes} needs a place where the machines meet", hint="give --rdzv HOST:PORT, the same on each"
        )
    where = ["--standalone"]
    if rendezvous is not None:
        where = [f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", "--rdzv-id=nanproof"]
    return [
        sys.executable,
        "-m",
        "nanproof.run.torchrun",
        *where,
        f"--nproc-per-node={nproc}",
        "-m",
        "nanproof",
        "run",
        *words,
    ]


def launch(command: Sequence[str], run_dir: Path) -> int:
    """Run it and return its exit code: 66 when the guard of any rank stopped the run on purpose."""
    known = {p: p.stat().st_mtime_ns for p in run_dir.glob("run*.json")}
    code = wait_for(command)
    written = [p for p in run_dir.glob("run*.json") if p.stat().st_mtime_ns != known.get(p)]
    stopped = any(json.loads(file_text(p)).get("exit_code") == GuardStop.exit_code for p in written)
    return GuardStop.exit_code if code and stopped else code


def _main() -> None:
    """Be torchrun, but end by a signal without a traceback: the ranks have said how they ended."""

    def leave(*_: object) -> None:
        show("nanproof: interrupted before a step was guarded", err=True)
        os._exit(128 + signal.SIGINT)

    # no KeyboardInterrupt: while torch is being imported something may catch it; torchrun puts its own handler here
    signal.signal(signal.SIGINT, leave)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.run import main

    try:
        main()
    except SignalException as ended:
        sys.exit(128 + ended.sigval)


if __name__ == "__main__":
    _main()
