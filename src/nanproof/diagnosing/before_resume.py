"""Before a resume: is everything in order, or will it break again? Go or no-go, with reasons.

The protocol: the config says what was meant, the code compiles and lints clean, disk and memory suffice, the checkpoint
is healthy and agrees with the config, and the data is readable and finite. What could not be checked is said, and is no
reason to call the rest clean.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..checkpoint.config import differences
from ..checkpoint.layout import discover
from ..checkpoint.report import ScanReport
from ..checkpoint.scan import scan_checkpoint
from ..config.check import check_settings
from ..config.code import Code
from ..config.project import Project
from ..errors import NanproofError, UsageError
from ..linting import lint
from ..records import to_json
from .data import scan_data
from .sources.configs import Config, find_configs
from .sources.part import name_in, shorten
from .sources.places import Places, find_places

Verdict = Literal["ok", "wrong", "doubtful", "unknown"]
MARKS: dict[Verdict, str] = {"ok": "✓", "wrong": "✗", "doubtful": "!", "unknown": "?"}
STOPPERS = ("NP701", "NP702", "NP708", "NP709")
"""Config checks whose findings make a resume break or differ from what was meant; the others are worth a word."""
FAMILIES = ("NP1", "NP2", "NP3", "NP4", "NP5", "NP308", "NP502")
COPIES = 3
"""A resume writes: the next checkpoint beside the old one, and a temporary copy of it."""
_DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".npy", ".npz", ".parquet")
_DATA_KEYS = ("data_path", "data_dir", "dataset_path", "train_file", "train_data", "data_root", "train_path", "datadir")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One point of the protocol."""

    point: Literal["config", "code", "resources", "checkpoint", "data"]
    verdict: Verdict
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Clearance:
    """The answer: go when nothing is wrong; what is doubtful or unknown is listed either way."""

    checkpoint: str
    checks: tuple[Check, ...]

    @property
    def go(self) -> bool:
        return not any(c.verdict == "wrong" for c in self.checks)

    @property
    def unchecked(self) -> tuple[Check, ...]:
        return tuple(c for c in self.checks if c.verdict == "unknown")

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = to_json(self)
        return {**data, "go": self.go}


def check_before_resume(checkpoint: str | os.PathLike[str], paths: Sequence[str | os.PathLike[str]] = ()) -> Clearance:
    """Run the protocol for one checkpoint. ``paths`` are where config and code are; default: this folder."""
    found = [c for c in discover([checkpoint]) if c.items]
    if len(found) != 1:
        raise UsageError(
            f"{os.fspath(checkpoint)} holds {len(found)} checkpoints, not one", hint="name the one to resume from"
        )
    report = scan_checkpoint(found[0])
    places = find_places(list(paths) or [Path()])
    configs = find_configs(places.configs, places.root)
    checks = (
        *_config(configs, places.code, places.root),
        *_code(places.code, places.root),
        *_resources(Path(os.fspath(checkpoint)), report),
        *_checkpoint(report, configs, places.root),
        *_data(configs, places),
    )
    return Clearance(checkpoint=report.name, checks=checks)


def _config(configs: Sequence[Config], code: Sequence[Path], root: Path) -> Iterator[Check]:
    """Whether the settings are what was meant: readable, read by the code, without contradiction."""
    if not configs:
        yield Check(point="config", verdict="unknown", found="no config was found; name its folder")
        return
    project = Project.read(*code)
    wrong = 0
    for config in configs:
        for note in config.settings.notes:
            yield Check(point="config", verdict="doubtful", found=shorten(note, root))
        for finding in check_settings(config.settings, project):
            stops = finding.code in STOPPERS
            wrong += stops
            place = f"{name_in(root, finding.path)}:{finding.line}" if finding.path else config.name
            words = f"{place}: {finding.message} ({finding.code})"
            yield Check(point="config", verdict="wrong" if stops else "doubtful", found=words)
    if not wrong:
        names = ", ".join(c.name for c in configs[:4])
        yield Check(point="config", verdict="ok", found=f"{names}: read, and without contradiction")


def _code(files: Sequence[Path], root: Path) -> Iterator[Check]:
    if not files:
        yield Check(point="code", verdict="unknown", found="no Python code was found; name its folder")
        return
    broken = 0
    for path in files:
        try:
            Code.read(path)
        except NanproofError as error:
            broken += 1
            yield Check(point="code", verdict="wrong", found=shorten(error.message, root))
    findings = lint(list(files), select=FAMILIES)
    for finding in findings[:20]:
        words = f"{name_in(root, finding.path)}:{finding.line}: {finding.message} ({finding.code})"
        yield Check(point="code", verdict="wrong", found=words)
    if len(findings) > 20:
        yield Check(point="code", verdict="wrong", found=f"{len(findings) - 20} more findings of nanproof lint")
    if not broken and not findings:
        words = f"Python files that compile and lint clean of NP1xx to NP5xx: {len(files):,}"
        yield Check(point="code", verdict="ok", found=words)


def _resources(path: Path, report: ScanReport) -> Iterator[Check]:
    """Room for what a resume writes, and memory for what it loads."""
    size = report.bytes
    free = shutil.disk_usage(path if path.is_dir() else path.parent).free
    words = f"{_size(free)} free on disk, {COPIES} checkpoints need {_size(COPIES * size)}"
    yield Check(point="resources", verdict="ok" if free >= COPIES * size else "wrong", found=words)
    memory = _memory()
    if memory is None:
        yield Check(point="resources", verdict="unknown", found="this system does not tell its free memory")
    else:
        words = f"{_size(memory)} of memory available, loading needs {_size(size)}"
        yield Check(point="resources", verdict="ok" if memory >= size else "wrong", found=words)


def _memory() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("MemAvailable:")), "")
    return int(line.split()[1]) * 1024 if line else None


def _size(count: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"


def _checkpoint(report: ScanReport, configs: Sequence[Config], root: Path) -> Iterator[Check]:
    """Healthy, and agreeing with the config on the rate, the optimizer and the loss scale."""
    if report.ok:
        yield Check(point="checkpoint", verdict="ok", found=f"{report.name}: healthy, {len(report):,} tensors")
    for reason in report.reasons[:6]:
        verdict: Verdict = "doubtful" if report.health == "suspect" else "wrong"
        yield Check(point="checkpoint", verdict=verdict, found=f"{report.name}: {reason}")
    if not report.ok and not report.reasons:
        yield Check(point="checkpoint", verdict="wrong", found=f"{report.name}: {report.health}")
    scale = report.settings.scale
    if scale is not None and scale < 1:
        words = f"{report.name}: its loss scale is {scale:g}: small gradients vanish; start a fresh scaler"
        yield Check(point="checkpoint", verdict="wrong", found=words)
    compared = 0
    for config in configs:
        numbers = _comparable(config)
        compared += bool(numbers)
        for difference in differences(report.settings, numbers):
            key = next((v for v in config.settings if v.key == difference.key), None)
            place = f" ({shorten(key.where, root)})" if key is not None else ""
            yield Check(point="checkpoint", verdict="wrong", found=f"{difference}{place}")
    if not compared:
        words = "no config with a learning rate was found to compare its state with"
        yield Check(point="checkpoint", verdict="unknown", found=words)


def _comparable(config: Config) -> dict[str, float]:
    """The numbers that a checkpoint also holds, by the key under which the config knows them."""
    found = {}
    for concept in ("lr", "eps", "beta1", "beta2"):
        value, number = config.meaning.get(concept), config.meaning.number(concept)
        if value is not None and number is not None:
            found[value.key] = number
    return found


def _data(configs: Sequence[Config], places: Places) -> Iterator[Check]:
    """The data that the config names by a key or by a path of its own, and the data that lies with the project."""
    root = places.root
    paths: dict[str, Path] = {}
    for config in configs:
        for value in config.settings:
            told = value.value
            if not isinstance(told, str) or not told or len(told) > 300:
                continue
            file = Path(told).suffix.lower() in _DATA_SUFFIXES
            if value.name.lower() in _DATA_KEYS or file:
                there = next((b / told for b in (Path(), root, config.path.parent) if (b / told).exists()), None)
                if there is not None:
                    paths.setdefault(told, there)
                elif file and not set(told) & set("*?{}$:"):
                    words = f"{told} does not exist ({shorten(value.where, root)})"
                    yield Check(point="data", verdict="doubtful", found=words)
    classes = _classes(configs)
    if not paths:
        paths = {name_in(root, path): path for path in places.data}
    if not paths:
        words = "no training data found: no config names a path that exists here"
        yield Check(point="data", verdict="unknown", found=words)
    for name, path in paths.items():
        report = scan_data(path, classes=classes)
        told_of = sorted((p for p in report.problems if p.cause or p.kind in _ODD), key=lambda p: not p.cause)
        for problem in told_of[:10]:
            worth: Verdict = "wrong" if problem.cause else "doubtful"
            yield Check(point="data", verdict=worth, found=_named(name, str(problem)))
        if report.ok and not told_of:
            files = "" if path.is_file() else f"{report.files:,} files, "
            words = f"{name}: {files}{report.rows:,} rows, finite and in range"
            yield Check(point="data", verdict="ok", found=words)
        elif not report.files and not told_of:
            yield Check(point="data", verdict="unknown", found=f"{name}: no file of a format that can be read here")


_ODD = ("out-of-range", "ignored-label", "empty")


def _classes(configs: Sequence[Config]) -> int | None:
    """The number of classes, where the configs agree on one."""
    names = ("num_classes", "n_classes", "num_labels", "nclasses", "n_class", "num_class")
    told = {int(v.number) for c in configs for v in c.settings if v.name.lower() in names and v.number and v.number > 1}
    return told.pop() if len(told) == 1 else None


def _named(name: str, problem: str) -> str:
    """A problem below the path that the config names; the file is not said twice."""
    file = Path(name).name
    return f"{Path(name).parent / problem}" if problem.startswith(f"{file} ") else f"{name}: {problem}"
