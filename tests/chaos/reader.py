"""The child that opens malformed files: limited in memory, with a watch over what it does. Run by `chaos.rubbish`.

It reads one JSON line per file from its input and writes one per file: what it made of it, or how it failed. Anything
that runs, connects or writes on behalf of a file is a violation and is written down as well.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nanproof.checkpoint.dcp  # noqa: F401  read when needed; here before anything is watched
from nanproof.checkpoint import scan_series
from nanproof.config import check_config, load
from nanproof.errors import NanproofError
from nanproof.linting import lint
from nanproof.logs import read
from nanproof.logs.timeline import timeline

ROOM = 512 << 20
"""How much memory more than at the start; a bomb wants far more."""
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
    "ctypes.dlopen",
    "os.remove",
    "os.rename",
    "shutil.rmtree",
)


def open_checkpoint(path: str) -> str:
    health = {r.health for r in scan_series(path, jobs=2).reports}
    return "clean" if health <= {"healthy"} else "not clean"


def open_log(path: str) -> str:
    series = read(path)
    story = timeline(series)
    json.dumps([m.text for m in story.moments])
    return "not clean" if series.loss is not None and series.loss.bad.any() else "clean"


def open_config(path: str) -> str:
    settings = load(path)
    found = check_config([path])
    return "clean" if len(list(settings)) and not found else "not clean"


def open_code(path: str) -> str:
    codes = {f.code for f in lint(path)}
    if "NP002" in codes:
        raise AssertionError("a rule failed")
    data = Path(path).read_bytes()
    try:
        ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "not clean" if "NP001" in codes or b"torch" not in data else "clean"
    return "not clean"  # it can be parsed, so there is nothing to be told of it


OPENERS: dict[str, Callable[[str], str]] = {
    "checkpoint": open_checkpoint,
    "log": open_log,
    "config": open_config,
    "code": open_code,
}


def answer(kind: str, path: str) -> dict[str, Any]:
    try:
        return {"verdict": OPENERS[kind](path)}
    except NanproofError as error:
        return {"verdict": "refused", "words": str(error)[:200]}
    except BaseException as error:
        return {"crash": f"{type(error).__name__}: {str(error)[:300]}"}


def watch(event: str, args: tuple[Any, ...]) -> None:
    writes = event == "open" and args[1] is not None and bool(set(str(args[1])) & set("wax+"))
    if event in FORBIDDEN or writes:
        print(json.dumps({"violation": f"{event} {str(args)[:200]}"}), flush=True)


def main(good: list[str]) -> None:
    for path in good:  # what is imported when it is needed is here now
        kind, _, place = path.partition(":")
        answer(kind, place)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    sys.addaudithook(watch)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps({"name": order["name"], **answer(order["kind"], order["path"])}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
