"""The configs that a run over files meets: checked by the room that reads them, shown and repaired like code.

A config is checked as it lies on the disk, with the code linted together around it: whether anybody reads a key, and
with what, is a question to the code.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NanproofError
from ..files import file_bytes
from ..records import Finding
from .document import Shown, Unreadable, open_document, read_bytes
from .engine import Checked, Problem
from .fix import Fixed, apply_edits, pick
from .rule import Change
from .settings import Settings, choose_checks
from .suppress import silenced
from .tree import line_starts

if TYPE_CHECKING:
    from ..config import Project

LIMIT = 10**6
"""Larger YAML and JSON files are data."""
MOST = 10_000
"""With more pairs of config and code than this, configs are checked without the code: half of it would mislead."""
_WORDS = (
    b"learning_rate",
    b"lr:",
    b"lr =",
    b"lr=",
    b'lr"',
    b"lr'",
    b"optim",
    b"fp16",
    b"bf16",
    b"amp:",
    b"amp =",
    b"amp=",
    b'amp"',
    b"precision",
    b"grad_clip",
    b"clip_grad",
    b"clip_norm",
    b"clip_val",
    b"grad_norm",
    b"max_norm",
    b"warmup",
    b"weight_decay",
    b"loss_scale",
    b"accumul",
    b"epochs",
    b"max_steps",
    b"betas",
)
_ARGUMENTS = (b"TrainingArguments", b"SFTConfig", b"DPOConfig", b"GRPOConfig", b"PPOConfig", b"RewardConfig")


class ConfigFile:
    """A YAML, JSON or TOML file, or a launch script, as findings are shown in it."""

    encoding = "utf-8"

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.data = path, data
        self.text = data.decode("utf-8", errors="replace")
        self._starts = line_starts(self.text)

    def locate(self, offset: int) -> tuple[str, int, int]:
        line = bisect_right(self._starts, offset)
        return self.path, line, offset - self._starts[line - 1] + 1

    def compiles(self) -> bool:
        """Whether its reader reads the file on the disk."""
        from ..config import load

        try:
            load(self.path)
        except NanproofError:
            return False
        return True

    def line(self, number: int) -> str:
        ends = [*self._starts[1:], len(self.text)]
        return self.text[self._starts[number - 1] : ends[number - 1]] if 1 <= number <= len(ends) else ""

    def offset(self, line: int, column: int) -> int:
        return min(self._starts[min(line, len(self._starts)) - 1] + column - 1, len(self.text))


class Configs:
    """The configs among files that are linted together."""

    def __init__(
        self,
        configs: Iterable[Path],
        codes: Sequence[Path],
        settings: Settings,
        select: Sequence[str],
        ignore: Sequence[str],
    ) -> None:
        self._codes, self._settings, self._select, self._ignore = codes, settings, select, ignore
        self.files = [path for path in configs if _about_training(path)]

    def instead(self, files: Iterable[Path]) -> Configs:
        """The same surroundings with other configs."""
        return Configs(files, self._codes, self._settings, self._select, self._ignore)

    def lint(self) -> Iterator[Checked]:
        """Every config, and every Python file with settings in it, that has findings."""
        codes = list(self._codes) if self.files else [c for c in self._codes if _holds_settings(c)]
        if len(self.files) * len(codes) > MOST:
            codes = []
        if not self.files and not codes:
            return
        wanted = choose_checks(self._select, self._ignore)
        found = [f for f in _check(self.files, codes) if f.code in wanted and f.path]
        for name in dict.fromkeys(f.path for f in found):
            checked = self._checked(name, [f for f in found if f.path == name])
            if checked.problems:
                yield checked

    def _checked(self, path: str, found: Sequence[Finding]) -> Checked:
        try:
            data = read_bytes(Path(path))
            document = ConfigFile(path, data)
        except Unreadable:
            return Checked(path=path)
        ignored = self._settings.ignored_in(Path(path)) if self._settings.per_file_ignores else frozenset()
        problems = []
        for finding in found:
            if finding.code in ignored or silenced(document.line, finding.line, finding.line, finding.code, ""):
                continue
            start = document.offset(finding.line, finding.column)
            end = start + len(document.text[start:].split("\n", 1)[0].rstrip())
            changes = tuple(Change(start=e.start, end=e.end, text=e.text) for e in finding.edits)
            problems.append(Problem(finding=finding, span=(start, end), changes=changes))
        return Checked(path=path, document=document, problems=tuple(problems))


def _check(configs: Sequence[Path], codes: Sequence[Path]) -> tuple[Finding, ...]:
    from ..config import Project, check_config
    from ..config.code import Code

    read = []
    for path in codes:
        try:
            read.append(Code.read(path))
        except NanproofError:
            continue  # the linter of code says so
    project = Project(codes=tuple(read))
    return tuple(f for f in check_config(configs, project) if f.code != "NP708" or _proved(f, project))


def _proved(finding: Finding, project: Project) -> bool:
    """Whether code shows that somebody computes with a string that looks like a number."""
    from ..config.checks.np708_yaml_float import computed

    name = finding.message.partition(":")[0].rpartition(".")[2]
    return bool(project.codes) and computed(name, project)


def fix_config(checked: Checked) -> Fixed | None:
    """A config with its safe edits made; nothing is looked at again before it is written."""
    if checked.document is None or Path(checked.path).suffix == ".py":
        return None
    chosen = pick(p for p in checked.problems if p.finding.edits and p.finding.safe)
    new = apply_edits(checked.document.data, [e for p in chosen for e in p.finding.edits])
    if not chosen or new == checked.document.data:
        return None
    left = tuple(p for p in checked.problems if p not in chosen)
    after = Checked(path=checked.path, document=ConfigFile(checked.path, new), problems=left)
    return Fixed(
        path=Path(checked.path),
        old=checked.document.data,
        new=new,
        repaired=tuple(p.finding for p in chosen),
        after=after,
    )


def open_shown(path: str, data: bytes) -> Shown:
    """Whatever a finding may be in."""
    from .discover import CONFIGS

    return ConfigFile(path, data) if path.endswith(CONFIGS) else open_document(path, data)


def _about_training(path: Path) -> bool:
    """Whether a file may set anything about training; tells CI workflows and data from configs at a glance."""
    try:
        if not path.is_file() or path.stat().st_size > LIMIT:
            return False
        data = file_bytes(path)
    except OSError:
        return False
    return any(word in data for word in _WORDS)


def _holds_settings(path: Path) -> bool:
    """Whether a Python file holds settings: a module of them, or the arguments of a trainer."""
    named = (
        "config" in path.stem.lower() or "config" in path.parent.name.lower() or path.stem in ("hparams", "defaults")
    )
    try:
        data = read_bytes(path)
    except Unreadable:
        return False
    return any(word in data for word in _ARGUMENTS) or (named and any(word in data for word in _WORDS))
