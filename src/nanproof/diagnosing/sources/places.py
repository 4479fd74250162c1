"""Where the evidence is: the files below the paths that were given, sorted by what they can tell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...checkpoint.layout import Checkpoint
from ...config.loading import SUFFIXES
from ...errors import missing
from ...files import open_file
from ...logs import LogFile, find_logs
from ..data.annotations import is_coco, is_yolo
from .checkpoints import find_checkpoints
from .environment import NAMES

MAX_FILES = 20_000
MAX_DEPTH = 8
SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "dist-packages", "venv", "env"})
# what a run found out is no setting of it: result.json, all_results.json, eval_metrics.json
_RESULTS = re.compile(
    r"(.*[_-])?(results?|metrics|scores|summary|analysis|history|report|status|predictions?|index|vocab|tokenizer\w*)"
    r"\.json",
    re.IGNORECASE,
)
# folders whose subfolders are one run each, and names that are a run by themselves
_RUNS = frozenset(
    {
        "runs",
        "outputs",
        "output",
        "logs",
        "out",
        "lightning_logs",
        "experiments",
        "exp",
        "exps",
        "results",
        "work_dirs",
        "wandb",
        "checkpoints",
        "saves",
        "multirun",
        "mlruns",
        "tb",
        "train_logs",
        "log",
        "ckpts",
    }
)
_RUN = re.compile(r"(?:version|run|exp|experiment|train|job|trial|offline-run)[-_]?\w*\d+\w*|\d{4}-\d\d-\d\d.*")
_PART = re.compile(
    r"\d+|attempt_\d+|(?:local_?)?(?:rank|node|worker|host|gpu|process|proc|global)[-_]?\d*"
    r"|train\w*|val\w*|test\w*|eval\w*|dev|metrics"
)
"""Folders that hold a part of a run: a rank, a split, one metric."""
_HISTORY = re.compile(
    r"\.?(?:bash|zsh|fish|sh|shell)?_?history(?:\.txt)?|(?:cmd|commands?|run_?command)\.txt", re.IGNORECASE
)
_ROOT = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")
_DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".npy", ".npz", ".parquet", ".arrow")
_DATA_FOLDERS = frozenset({"data", "dataset", "datasets", "annotations", "labels", "corpus"})
MAX_DATA, MAX_DATA_BYTES = 6, 20 << 20
SOUGHT = (
    "logs (text, JSON lines, CSV, trainer_state.json, TensorBoard, W&B, MLflow, Trackio), configs (YAML, JSON, TOML, "
    "Python, launch scripts), checkpoints, incidents of guarded runs, Python code, pip freeze or nvidia-smi"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What was found, each kind in its own list."""

    root: Path
    logs: tuple[LogFile, ...] = ()
    earlier: tuple[LogFile, ...] = ()
    """Logs of the other runs beside this one, which it may have gone on from."""
    configs: tuple[Path, ...] = ()
    code: tuple[Path, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    incidents: tuple[Path, ...] = ()
    environment: tuple[Path, ...] = ()
    notebooks: tuple[Path, ...] = ()
    history: tuple[Path, ...] = ()
    """What a shell remembers of the commands that were typed."""
    data: tuple[Path, ...] = ()
    """Tables and arrays that look like training data, small enough to read at once."""
    notes: tuple[str, ...] = field(default=())

    @property
    def empty(self) -> bool:
        kinds = (self.logs, self.configs, self.code, self.checkpoints, self.incidents, self.environment, self.notebooks)
        return not any(kinds)


def find_places(paths: Sequence[str | os.PathLike[str]]) -> Places:
    """Look below all paths; what is named as a file counts even when its name says nothing.

    From the folder of one run, or its log, code and configs are also looked for in the project around it. Of several
    runs only the newest is read: evidence of two runs proves nothing about either.
    """
    named = [Path(p) for p in paths]
    for path in named:
        if not path.exists():
            raise missing(path, "name a folder or files of the run")
    root = (
        named[0] if len(named) == 1 and named[0].is_dir() else Path(os.path.commonpath([p.absolute() for p in named]))
    )
    root = root if root.is_dir() else root.parent
    files = list(_walk(named))
    notes = [f"only the first {MAX_FILES:,} files were looked at"] if len(files) >= MAX_FILES else []
    found = {(log.path, log.run): log for path in named for log in find_logs(path)}
    logs, left = _newest_run(list(found.values()), root)
    if left:
        word = "run was" if len(left) == 1 else "runs were"
        notes.append(f"{len(left)} other {word} not diagnosed: {', '.join(left[:3])}")
    files = [f for f in files if not any(_within(f, root / name) for name in left)]
    project = _project(root, files, beside=len(named) == 1 and named[0].is_file())
    project = Path(os.path.relpath(project)) if project is not None and not root.is_absolute() else project
    around = [f for f in _walk([project], depth=3) if not _in_run(f, project)] if project is not None else []
    if project is not None:
        notes.append(f"code and configs are those of {os.path.relpath(project)}")
    checkpoints = [c for c in find_checkpoints(named) if not any(_within(Path(c.path), root / n) for n in left)]
    # a run folder of nanproof may hold the config of the run as well
    other = {Path(log.path) for log in found.values() if log.format != "nanproof"} | {Path(c.path) for c in checkpoints}
    every = [*files, *(f for f in around if f not in set(files))]
    return Places(
        root=root,
        logs=tuple(sorted(logs, key=lambda log: -log.modified)),
        earlier=tuple(log for log in found.values() if log not in logs)[:MAX_EARLIER] if left else (),
        configs=tuple(f for f in every if _may_be_config(f, other) and not _came_later(f, logs)),
        code=tuple(f for f in every if f.suffix == ".py" and not _came_later(f, logs)),
        notebooks=tuple(f for f in every if f.suffix == ".ipynb"),
        history=tuple(f for f in every if _HISTORY.fullmatch(f.name)),
        checkpoints=tuple(checkpoints),
        incidents=tuple(f for f in files if f.name == "incident.json"),
        environment=tuple(f for f in every if NAMES.fullmatch(f.name)),
        data=tuple(dict.fromkeys(_data_of(f) for f in every if _may_be_data(f, other, root)))[:MAX_DATA],
        notes=tuple(notes),
    )


def _within(file: Path, folder: Path) -> bool:
    return folder == file or folder in file.parents


def _run_of(path: Path, root: Path) -> str:
    """The folder of the run that a log belongs to, below the root; "" when it lies beside everything else."""
    parts = Path(path).relative_to(root).parts if Path(path).is_relative_to(root) else ()
    best = ""
    for i, part in enumerate(parts[:-1]):
        if part.lower() in _RUNS and i + 2 < len(parts):
            best = str(Path(*parts[: i + 2]))
        elif _RUN.fullmatch(part.lower()):
            best = str(Path(*parts[: i + 1]))
    return best


def _siblings(logs: Sequence[LogFile], root: Path) -> dict[str, str]:
    """Folders beside each other that hold the same log are one run each, unless they are its ranks or its splits."""
    same: dict[tuple[object, ...], dict[str, list[str]]] = {}
    for log in logs:
        path = Path(log.path)
        parts = path.relative_to(root).parts if path.is_relative_to(root) else ()
        for i, part in enumerate(parts if path.is_dir() else parts[:-1]):
            if not _PART.fullmatch(part.lower()):
                key = (parts[:i], parts[i + 1 :], log.format)
                same.setdefault(key, {}).setdefault(str(Path(*parts[: i + 1])), []).append(log.path)
    found: dict[str, str] = {}
    for folders in sorted((f for f in same.values() if len(f) > 1), key=lambda f: len(Path(next(iter(f))).parts)):
        for folder, held in folders.items():
            found = {**dict.fromkeys(held, folder), **found}  # the outermost folder counts
    return found


def _newest_run(logs: list[LogFile], root: Path) -> tuple[list[LogFile], list[str]]:
    groups: dict[str, list[LogFile]] = {}
    siblings = _siblings(logs, root)
    for log in logs:
        groups.setdefault(_run_of(Path(log.path), root) or siblings.get(log.path, ""), []).append(log)
    runs = {name: max(log.modified for log in group) for name, group in groups.items() if name}
    runs = {n: t for n, t in runs.items() if not any(n != o and o.startswith(f"{n}/") for o in runs)}
    if len(runs) < 2:
        return logs, []
    told = max(runs.values()) - min(runs.values()) > AT_ONCE
    newest = max(runs, key=lambda name: (runs[name] if told else 0.0, _natural(name)))
    left = sorted(set(runs) - {newest})
    return [log for log in logs if not any(_within(Path(log.path), root / n) for n in left)], left


MAX_EARLIER = 6
AT_ONCE = 2.0
"""Seconds within which the logs of all runs were written when a folder was cloned or copied: its times tell nothing."""


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """A key that puts version_10 behind version_9."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,18})", name))


def _project(root: Path, files: Sequence[Path], *, beside: bool = False) -> Path | None:
    """The project around the folder of a run that has no code of its own, or ``beside`` a log that was given alone."""
    if any(f.suffix == ".py" for f in files):
        return None
    here = root.absolute()
    inside = False
    for folder in [*([here] if beside else []), *here.parents][:4]:
        inside = inside or here.name.lower() in _RUNS or _RUN.fullmatch(here.name.lower()) is not None
        try:
            names = {f.name for f in folder.iterdir()}
        except OSError:
            return None
        trains = any(re.fullmatch(r"(train|main|finetune|pretrain|run)\w*\.py", n) for n in names)
        if (trains or names.intersection(_ROOT)) and (inside or folder.name.lower() in _RUNS or trains):
            return folder if trains or (inside and any(n.endswith(".py") for n in names)) else None
        here, inside = folder, inside or folder.name.lower() in _RUNS
    return None


def _in_run(file: Path, project: Path) -> bool:
    parts = file.relative_to(project).parts[:-1]
    return any(p.lower() in _RUNS or p.lower() in ("tests", "test") for p in parts)


def _data_of(file: Path) -> Path:
    """The path to scan: of boxes that have a file for each image, their folder."""
    return file.parent if file.suffix.lower() in (".xml", ".txt") else file


def _may_be_data(file: Path, other: set[Path], root: Path) -> bool:
    """A table or array of samples: not a log, not inside of a run or an incident."""
    if file.suffix.lower() in (".xml", ".txt", ".json"):
        return file not in other and _holds_boxes(file)
    if file.suffix.lower() not in _DATA_SUFFIXES or re.search(r"(?i)log|history|metrics|results", file.name):
        return False
    if file in other or any(f in other for f in file.parents):
        return False
    parts = {p.lower() for p in (file.relative_to(root).parts[:-1] if file.is_relative_to(root) else file.parts[:-1])}
    named = re.match(r"(?i)(train|val|valid|test|dev|data|docs|samples|labels|annotations|corpus)", file.name)
    try:
        small = file.stat().st_size <= MAX_DATA_BYTES
    except OSError:
        return False
    return small and "incidents" not in parts and bool(parts & _DATA_FOLDERS or named)


def _holds_boxes(file: Path) -> bool:
    """Annotations of object detection: a VOC file, a YOLO label file, or a COCO file that is not too large."""
    try:
        if file.suffix.lower() == ".json":
            return file.stat().st_size <= MAX_DATA_BYTES and is_coco(file)
        if file.suffix.lower() == ".txt":
            return is_yolo(file)
        with open_file(file) as stream:
            return b"<annotation" in stream.read(400)
    except OSError:
        return False


def _may_be_config(file: Path, other: set[Path]) -> bool:
    """By its ending; logs, results, and what lies inside of a checkpoint or a run folder, describe something else."""
    return (
        file.suffix.lower() in SUFFIXES
        and not _RESULTS.fullmatch(file.name)
        and "incidents" not in file.parts[-3:-1]
        and file not in other
        and not any(folder in other for folder in file.parents)
    )


def _came_later(file: Path, logs: Sequence[LogFile]) -> bool:
    """Whether harden or lint wrote this file beside that of the run after the run had ended: it was never in force."""
    stem = file.stem.removesuffix("_stable")
    if stem == file.stem or not file.with_name(f"{stem}{file.suffix}").exists() or not logs:
        return False
    return file.stat().st_mtime > max(log.modified for log in logs)


def _walk(named: Sequence[Path], depth: int = MAX_DEPTH) -> Iterator[Path]:
    count = 0
    for path in named:
        if path.is_file():
            yield path
            continue
        for folder, folders, names in os.walk(path):
            keep = len(Path(folder).relative_to(path).parts) < depth
            folders[:] = sorted(
                f for f in folders if keep and f not in SKIPPED and (not f.startswith(".") or f == ".hydra")
            )
            for name in sorted(names):
                count += 1
                if count > MAX_FILES:
                    return
                if not name.startswith(".") or _HISTORY.fullmatch(name):
                    yield Path(folder, name)
