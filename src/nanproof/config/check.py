"""What a config check is: one object in one file of `checks/`, found by its folder, documented by itself.

`check_config` runs them over files; `nanproof lint` and `diagnose` share it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from ..plugins import plugins
from ..records import Edit, Finding
from ..topics import Topic
from .calls import is_arguments
from .code import Code
from .dialect import dialect_of
from .hydra import is_hydra
from .loading import SHELL, TREES, load_quietly
from .meaning import Meaning
from .project import Project
from .pythonfile import values as python_values
from .value import Layers, Settings, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check with everything that is to be said about it; its page in the docs is written from it."""

    code: str
    name: str
    what: str
    why: str
    bad: str
    """A YAML config on which exactly this check fires, beside the code in ``beside`` if it needs some."""
    good: str
    beside: str = ""
    facts: Mapping[str, object] | None = None
    """What must be known of the run for the example to fire."""
    false_alarm: str
    fix: Literal["safe", "none"] = "none"
    check: Callable[[Settings, Project], Iterator[Finding]]

    @property
    def topic(self) -> Topic:
        """The page about this check."""
        beside = f"\n\nbeside this code:\n\n```py\n{self.beside.strip()}\n```" if self.beside else ""
        given = "".join(f"\n\ngiven that `{k}` is {v}" for k, v in (self.facts or {}).items())
        fixes = {
            "safe": "Safe: `nanproof lint --fix` applies it.",
            "none": "`nanproof harden CONFIG` proposes a change with its reason; nothing is changed by `lint --fix`.",
        }
        sections = (
            ("What it does", self.what),
            ("Why it matters", self.why),
            ("Example", f"```yaml\n{self.bad.strip()}\n```{beside}{given}"),
            ("Use instead", f"```yaml\n{self.good.strip()}\n```"),
            ("The fix", fixes[self.fix]),
            ("When it is a false alarm", f"{self.false_alarm.strip()}\n\nSilence one line with `# noqa: {self.code}`."),
        )
        return Topic(name=self.code, title=self.name, sections=sections)


@cache
def checks() -> tuple[Check, ...]:
    """All checks, in the order of their codes."""
    folder = Path(__file__).parent / "checks"
    names = sorted(m.name for m in pkgutil.iter_modules([str(folder)]))
    own = (importlib.import_module(f"{__package__}.checks.{name}").CHECK for name in names)
    return (*own, *plugins("checks", Check))


def report(code: str, value: Value, message: str, help: str = "", edits: tuple[Edit, ...] = ()) -> Finding:
    """A finding at the place where a value is written."""
    return Finding(
        code=code,
        path=value.path,
        line=max(value.line, 1),
        column=value.column,
        message=message,
        help=help,
        edits=edits,
        safe=bool(edits),
    )


def check_settings(settings: Settings, project: Project | None = None) -> tuple[Finding, ...]:
    """Every finding on one resolved view; findings outside of files (a command line) have an empty path."""
    known = (project or Project()).with_codes(settings.codes)
    found = [finding for check in checks() for finding in check.check(settings, known)]
    return tuple(sorted(set(found), key=lambda f: (f.path, f.line, f.column, f.code)))


def check_config(configs: Iterable[str | Path], project: Project | None = None) -> tuple[Finding, ...]:
    """Check config files, each by itself, with the project's code beside it; findings of all of them.

    Files that set nothing about training, or cannot be read, are passed over. The code is checked too, as far as it
    holds settings: `TrainingArguments` and config modules. The one accelerate config among the files, if there is
    one, belongs to all.
    """
    known = project or Project()
    paths = [p for p in map(Path, configs) if p.suffix in (*TREES, *SHELL) and _is_small(p)]
    views = {p: load_quietly(p) for p in paths}
    shared = [p for p, s in views.items() if _dialect(s) == "accelerate"]
    composed = {p.parent for p in paths if p.suffix in (".yaml", ".yml") and is_hydra(p)}
    by_hydra = known.with_facts({"loader": "omegaconf"})
    found: list[Finding] = []
    for path, settings in views.items():
        if not is_training(settings):
            continue
        if len(shared) == 1 and path != shared[0]:
            joined = load_quietly(shared[0], path)
            settings = joined if not joined.notes else settings
        found += check_settings(settings, known if composed.isdisjoint(path.parents) else by_hydra)
    for code in known.codes:
        alone = python_settings(code)
        if alone is not None:
            found += [f for f in check_settings(alone, Project(facts=known.facts)) if f.path == code.path]
    once = {(f.path, f.line, f.column, f.code): f for f in reversed(found)}  # a value of several configs counts once
    return tuple(once[place] for place in sorted(once))


def _is_small(path: Path) -> bool:
    """Whether a file may be a config: what is larger is data."""
    return path.is_file() and path.stat().st_size <= _LARGE


def _dialect(settings: Settings) -> str:
    return next((v.origin for v in settings if v.origin in ("accelerate", "deepspeed")), "") or dialect_of(
        v.key for v in settings
    )


_TRAINING = {
    "lr",
    "optimizer",
    "clip_norm",
    "fp16",
    "bf16",
    "amp",
    "mixed_precision",
    "accumulation",
    "loss_scale",
    "epochs",
    "max_steps",
    "warmup_steps",
    "weight_decay",
    "norm_eps",
    "betas",
    "eps",
}


_ARGUMENTS = re.compile(rb"Arguments|[A-Z]\w*Config\b")
_LARGE = 256 << 10


def is_training(settings: Settings) -> bool:
    """Whether a file is about training at all: CI workflows and package files are not."""
    return len(_TRAINING & set(Meaning.of(settings).found)) >= 1


def python_settings(code: Code) -> Settings | None:
    """The settings in a Python file: of a config module all, of other code what goes to a trainer's arguments."""
    path = Path(code.path)
    module = (
        "config" in path.stem.lower() or "config" in path.parent.name.lower() or path.stem in ("hparams", "defaults")
    )
    if not module and not code.mentions(_ARGUMENTS):
        return None
    layers = Layers()
    for value in python_values(code):
        holder = value.key.partition(".")[0]
        if (module and value.origin != "call") or (value.origin == "call" and is_arguments(holder)):
            layers.put(value)
    settings = layers.settings()
    return settings if is_training(settings) else None
