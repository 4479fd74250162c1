"""Where the evidence is: the files below the paths that were given, sorted by what they can tell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...checkpoint.layout import Checkpoint
from ...config.loading import SUFFIXES
from ...errors import UsageError
from ...logs import LogFile, find_logs
from .checkpoints import find_checkpoints
from .environment import NAMES

MAX_FILES = 20_000
MAX_DEPTH = 8
SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "dist-packages", "venv", "env"})
# what a run found out is no setting of it: result.json, all_results.json, eval_metrics.json
_RESULTS = re.compile(r"(.*[_-])?(results?|metrics|scores|summary)\.json", re.IGNORECASE)
SOUGHT = (
    "logs (text, JSON lines, CSV, trainer_state.json, TensorBoard, W&B, MLflow, Trackio), configs (YAML, JSON, TOML, "
    "Python, launch scripts), checkpoints, incidents of guarded runs, Python code, pip freeze or nvidia-smi"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What was found, each kind in its own list."""

    root: Path
    logs: tuple[LogFile, ...] = ()
    configs: tuple[Path, ...] = ()
    code: tuple[Path, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    incidents: tuple[Path, ...] = ()
    environment: tuple[Path, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def empty(self) -> bool:
        return not (self.logs or self.configs or self.code or self.checkpoints or self.incidents or self.environment)


def find_places(paths: Sequence[str | os.PathLike[str]]) -> Places:
    """Look below all paths; what is named as a file counts even when its name says nothing."""
    named = [Path(p) for p in paths]
    for path in named:
        if not path.exists():
            raise UsageError(f"{path} does not exist", hint="name a folder or files of the run")
    root = (
        named[0] if len(named) == 1 and named[0].is_dir() else Path(os.path.commonpath([p.absolute() for p in named]))
    )
    root = root if root.is_dir() else root.parent
    files = list(_walk(named))
    notes = (f"only the first {MAX_FILES:,} files were looked at",) if len(files) >= MAX_FILES else ()
    logs = {(log.path, log.run): log for path in named for log in find_logs(path)}
    checkpoints = find_checkpoints(named)
    # a run folder of nanproof may hold the config of the run as well
    other = {Path(log.path) for log in logs.values() if log.format != "nanproof"} | {Path(c.path) for c in checkpoints}
    return Places(
        root=root,
        logs=tuple(sorted(logs.values(), key=lambda log: -log.modified)),
        configs=tuple(f for f in files if _may_be_config(f, other)),
        code=tuple(f for f in files if f.suffix == ".py"),
        checkpoints=tuple(checkpoints),
        incidents=tuple(f for f in files if f.name == "incident.json"),
        environment=tuple(f for f in files if NAMES.fullmatch(f.name)),
        notes=notes,
    )


def _may_be_config(file: Path, other: set[Path]) -> bool:
    """By its ending; logs, results, and what lies inside of a checkpoint or a run folder, describe something else."""
    return (
        file.suffix.lower() in SUFFIXES
        and not _RESULTS.fullmatch(file.name)
        and "incidents" not in file.parts[-3:-1]
        and file not in other
        and not any(folder in other for folder in file.parents)
    )


def _walk(named: Sequence[Path]) -> Iterator[Path]:
    count = 0
    for path in named:
        if path.is_file():
            yield path
            continue
        for folder, folders, names in os.walk(path):
            depth = len(Path(folder).relative_to(path).parts)
            keep = depth < MAX_DEPTH
            folders[:] = sorted(
                f for f in folders if keep and f not in SKIPPED and (not f.startswith(".") or f == ".hydra")
            )
            for name in sorted(names):
                count += 1
                if count > MAX_FILES:
                    return
                if not name.startswith("."):
                    yield Path(folder, name)
