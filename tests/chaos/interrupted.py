"""Tier B: each writer is killed, or meets a full disk, a broken one or a short write, at each of its operations.

What is left must open and be the old or the new. A writer is told by what it starts from, what it does, and how what
it left is read; each attempt is made by a child process on a copy of the start.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401  here, not again in every child
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

from nanproof import Guard, files, journal
from nanproof.checkpoint import scan, scan_series
from nanproof.checkpoint.layout import discover
from nanproof.checkpoint.quarantine import quarantine, undo
from nanproof.checkpoint.repair import repair
from nanproof.errors import NanproofError
from nanproof.records import Incident, from_json
from nanproof.report.html import write_html
from nanproof.report.markdown import write_markdown
from nanproof.report.plot import write_png
from nanproof.watch.runs import find_runs
from support.runs import make_batches, make_run, with_faults

SAID = "said"
"""A file outside of what is judged, in which the child says what came out."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    name: str
    prepare: Callable[[Path], None]
    write: Callable[[Path], str]
    """Returns what must be the same whatever the disk does; empty where that is nothing."""
    read: Callable[[Path], Any]
    between: Callable[[Any, Any, Any], bool] = lambda left, old, new: left in (old, new)
    fresh: bool = False
    """Whether each attempt prepares its own start, because what is prepared knows where it stands."""


@dataclass(frozen=True, kw_only=True)
class Case:
    writer: str
    point: str
    turn: int
    fault: files.Fault

    def __str__(self) -> str:
        return f"files:{self.writer.replace(' ', '-')}/{self.point}:{self.turn}:{self.fault}"


def read_case(text: str) -> Case:
    """The case of ``files:journal/rename:2:kill``."""
    writer, _, rest = text.removeprefix("files:").partition("/")
    point, turn, fault = rest.split(":")
    return Case(writer=writer.replace("-", " "), point=point, turn=int(turn), fault=fault)  # type: ignore[arg-type]


# --- the writers ----------------------------------------------------------------------------------------------------


def _save_two(home: Path) -> None:
    run = make_run(keep=2)
    for name in ("a.pt", "b.pt"):
        run.feed(make_batches(2))
        run.guard.save(home / name)
    run.guard.close()


def _save_third(home: Path) -> str:
    run = make_run(keep=2)
    run.guard.resume(home)
    run.feed(make_batches(3))
    run.guard.save(home / "c.pt")  # and a.pt goes
    run.guard.save(home / "b.pt")  # and b.pt is replaced
    run.guard.close()
    return ""


def _resumed(home: Path) -> str:
    """The state that a resume finds; every checkpoint in sight must open."""
    for path in home.glob("*.pt"):
        torch.load(path, weights_only=True)
    run = make_run(keep=2)
    run.guard.resume(home)
    run.guard.close()
    return run.digest()


def _save_sharded(home: Path) -> str:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    fully_shard(model)
    guard = Guard(model, torch.optim.AdamW(model.parameters()))
    guard.step(lambda: model(torch.ones(3, 4)).square().mean())
    guard.save(home / "b")
    guard.close()
    return ""


def _shards(home: Path) -> dict[str, str]:
    return {p.name: scan(p).health for p in home.iterdir() if not p.name.startswith(".") and p.is_dir()}


def _train(home: Path) -> str:
    try:
        run = make_run(run_dir=home / "run", log_every=1)
    except (OSError, NanproofError):
        return "refused to start"
    run.feed(with_faults(make_batches(6), {3: "nan"}))
    run.guard.close()
    return run.digest()


def _run_folder(home: Path) -> dict[str, Any]:
    """What the folder of a run holds; each incident must be whole."""
    log = home / "run" / "training_log.jsonl"
    incidents = {}
    for folder in (home / "run" / "incidents").glob("[0-9]*"):
        incident = from_json(Incident, json.loads((folder / "incident.json").read_text()))
        for name in incident.bundle.values():
            load_file(folder / name) if name.endswith("safetensors") else json.loads((folder / name).read_text())
        incidents[folder.name] = sorted(p.name for p in folder.iterdir())
    lines = list(files.read_jsonl(log)) if log.exists() else []
    return {"incidents": incidents, "steps": [r["step"] for r in lines if "event" not in r]}


def _lines_and_incidents(left: Any, old: Any, new: Any) -> bool:
    """A full disk may cost log lines, whole ones; an incident is there or it is not."""
    rest = iter(new["steps"])
    return left["incidents"] in (old["incidents"], new["incidents"]) and all(s in rest for s in left["steps"])


SOURCES = {"a.py": b"one\r\n", "pkg/b.py": b"two"}
CHANGED = {"a.py": b"ONE\r\n", "pkg/b.py": b"TWO", "pkg/made.py": b"made"}


def _plant(home: Path) -> None:
    (home / "pkg").mkdir()
    for name, data in SOURCES.items():
        (home / name).write_bytes(data)


def _apply(home: Path) -> str:
    journal.apply({home / name: data for name, data in CHANGED.items()}, home=home, why="fix")
    return ""


def _undo(home: Path) -> str:
    journal.undo(home)
    return ""


def _sources(home: Path) -> dict[str, bytes]:
    journal.recover(home)
    found = (p for p in home.rglob("*") if p.is_file() and ".nanproof" not in p.parts)
    return {p.relative_to(home).as_posix(): p.read_bytes() for p in found}


def _append(home: Path) -> str:
    log = files.JsonLines(home / "log.jsonl")
    log.append({"step": i} for i in range(3))
    log.append([{"step": 3, "loss": "NaN"}])
    return ""


def _log_lines(home: Path) -> list[Any]:
    return list(files.read_jsonl(home / "log.jsonl"))


def _log(home: Path, count: int) -> None:
    lines = [{"step": s, "loss": 3.0 / (s + 1), "grad_norm": 1.0, "lr": 1e-4} for s in range(count)]
    (home / "run").mkdir(exist_ok=True)
    (home / "run" / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # a run that has ended: one that may still be running is called stale after a while, on a slow machine too
    (home / "run" / "run.json").write_text(json.dumps({"exit_code": 0, "state": "finished"}))


def _report(home: Path) -> str:
    with contextlib.chdir(home):  # reports name the path that was given
        for name, write in (("a.html", write_html), ("a.md", write_markdown), ("a.png", write_png)):
            write(find_runs(["run"]), name)
    return ""


def _old_report(home: Path) -> None:
    _log(home, 5)
    _report(home)
    _log(home, 9)


def _each_old_or_new(left: Any, old: Any, new: Any) -> bool:
    return left.keys() == new.keys() and all(left[k] in (old[k], new[k]) for k in left)


def _contents(home: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(home.iterdir()) if p.is_file() and not p.name.startswith(".")}


def _bad_checkpoint(home: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    torch.manual_seed(0)
    torch.nn.init.normal_(model[0].weight)
    torch.save({"model": model.state_dict()}, home / "good.pt")
    model[1].running_var[1] = float("nan")
    torch.save({"model": model.state_dict()}, home / "bad.pt")


def _repair(home: Path) -> str:
    (checkpoint,) = discover([home / "bad.pt"])
    repair(checkpoint, scan(home / "bad.pt"), home / "repaired.pt")
    return ""


def _quarantine(home: Path) -> str:
    quarantine(list(scan_series(home)), home / "aside")
    return ""


def _taken_back(home: Path) -> dict[str, bytes]:
    if (home / "aside").is_dir() and any((home / "aside").iterdir()):
        undo(home / "aside")
    return _contents(home)


def _nothing(home: Path) -> None:
    pass


def _applied(home: Path) -> None:
    _plant(home)
    _apply(home)


def _started_log(home: Path) -> None:
    (home / "log.jsonl").write_text('{"step":-1}\n{"torn')


def _prefix(left: Any, old: Any, new: Any) -> bool:
    rest = iter(new)
    return left[: len(old)] == old and all(line in rest for line in left)


WRITERS = {
    w.name: w
    for w in (
        Writer(name="checkpoint", prepare=_save_two, write=_save_third, read=_resumed),
        Writer(name="sharded checkpoint", prepare=_nothing, write=_save_sharded, read=_shards),
        Writer(name="incident and log", prepare=_nothing, write=_train, read=_run_folder, between=_lines_and_incidents),
        Writer(name="journal", prepare=_plant, write=_apply, read=_sources),
        Writer(name="undo", prepare=_applied, write=_undo, read=_sources, fresh=True),
        Writer(name="log", prepare=_started_log, write=_append, read=_log_lines, between=_prefix),
        Writer(name="report", prepare=_old_report, write=_report, read=_contents, between=_each_old_or_new),
        Writer(name="repair", prepare=_bad_checkpoint, write=_repair, read=_contents),
        Writer(name="quarantine", prepare=_bad_checkpoint, write=_quarantine, read=_taken_back),
    )
}


# --- the attempts ---------------------------------------------------------------------------------------------------


def _in_child(work: Callable[[], str], said: Path) -> int:
    """The exit code of a child that works: 0, 1 when it gave up in an orderly way, 3 when it fell over."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 3
        try:
            logging.disable(logging.CRITICAL)
            said.write_text(work())
            code = 0
        except (OSError, NanproofError) as error:
            said.write_text(f"{type(error).__name__}: {error}")
            code = 1
        except BaseException as error:
            said.write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        files.disarm()


class Stage:
    """One writer with its start, its old and its new, worked out once."""

    def __init__(self, writer: Writer, folder: Path) -> None:
        self.writer = writer
        self._folder = folder
        self._count = itertools.count()
        self._start = folder / "start"
        self._start.mkdir(parents=True)
        with _quiet():
            writer.prepare(self._start)  # here: what it imports need not be imported by every child
            self.old = writer.read(self._fresh())
            done = self._fresh()
            assert _in_child(lambda: self._count_passes(done), folder / SAID) == 0, (folder / SAID).read_text()
            self.passes, self.said = json.loads((folder / SAID).read_text())
            self.new = writer.read(done)

    def cases(self) -> list[Case]:
        """Every fault at every operation that the writer comes by."""
        return [
            Case(writer=self.writer.name, point=point, turn=turn, fault=fault)
            for point, count in self.passes.items()
            for turn in range(1, count + 1)
            for fault in files.FAULTS
            if fault != "short" or point in ("write", "append")
        ]  # type: ignore[misc]

    def check(self, case: Case) -> None:
        """Make one attempt; an AssertionError says what did not hold."""
        home, said = self._fresh(), self._folder / SAID
        said.unlink(missing_ok=True)
        with _quiet():
            code = _in_child(lambda: self._attempt(home, case), said)
            told = said.read_text() if said.exists() else ""
            assert code in ((-signal.SIGKILL,) if case.fault == "kill" else (0, 1)), f"exit code {code}: {told}"
            if code == 0 and self.said and told != "refused to start":
                assert told == self.said, "the run went on, and came out different"
            left = self.writer.read(home)
            assert self.writer.between(left, self.old, self.new), f"neither old nor new: {str(left)[:500]}"
            code = _in_child(lambda: self.writer.write(home), said)
            assert code in (0, 1), f"what comes afterwards: {said.read_text()}"
            self.writer.read(home)
        shutil.rmtree(home)

    def _attempt(self, home: Path, case: Case) -> str:
        files.arm(case.point, on=case.turn, fault=case.fault)
        return self.writer.write(home)

    def _count_passes(self, home: Path) -> str:
        for point in files.POINTS:
            files.arm(point, on=1 << 60)
        said = self.writer.write(home)
        return json.dumps([{k: n for k, n in files._passed.items() if n}, said])

    def _fresh(self) -> Path:
        """A place that looks like the start."""
        home = self._folder / str(next(self._count))
        if self.writer.fresh:
            home.mkdir()
            self.writer.prepare(home)
        else:
            shutil.copytree(self._start, home)
        return home


def sample(cases: list[Case], count: int, seed: int) -> list[Case]:
    """Some of all cases; each point and each fault at least once where they are enough."""
    dice = random.Random(f"files:{seed}")
    dice.shuffle(cases)
    seen: set[tuple[str, str]] = set()
    first = [c for c in cases if (c.point, c.fault) not in seen and not seen.add((c.point, c.fault))]  # type: ignore[func-returns-value]
    return (first + [c for c in cases if c not in first])[:count]
