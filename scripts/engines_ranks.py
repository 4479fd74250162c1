"""Starts the ranks of `make engines` as torchrun does, but forked from one process that has imported torch.

python scripts/engines_ranks.py torch.distributed.fsdp     # imports that; then a job per line on stdin, as JSON

Importing torch and an engine takes longer than any of these trainings, so each environment does it once. Each rank is a
process of its own: a job's `words` are what would follow `python`, `-m nanproof run … script.py …` or `script.py …`.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print as soon as they are imported
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        start = time.monotonic()
        hung = run(json.loads(line))
        answers.write(json.dumps({"seconds": time.monotonic() - start, "hung": hung}) + "\n")


def run(job: dict[str, Any]) -> list[int]:
    """Fork the ranks of a job and wait for them; those that had to be killed after its timeout are returned."""
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks: dict[int, int] = {}
    for rank in range(job["world"]):
        number, size = str(rank), str(job["world"])
        launched = {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "NODE_RANK": "0",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        child = os.fork()
        if not child:
            be(job, output, launched if job["launched"] else {})
        ranks[child] = rank
    os.close(output)
    limit = time.monotonic() + job["timeout"]
    while ranks and time.monotonic() < limit:
        ended, _ = os.waitpid(-1, os.WNOHANG)
        ranks.pop(ended, None)
        if not ended:
            time.sleep(0.05)
    for child in ranks:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return sorted(ranks.values())


def be(job: dict[str, Any], output: int, environment: dict[str, str]) -> None:
    """Become `python words…`, in a process group of its own so that whatever it starts can be ended with it."""
    code: object = 1
    try:
        os.setpgid(0, 0)
        os.environ.update(job["environment"] | environment)
        os.chdir(job["folder"])
        os.dup2(output, 1)
        os.dup2(output, 2)
        words = job["words"]
        sys.orig_argv = [sys.executable, *words]
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[0] = str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
