"""Everything that hardening looks at: the config resolved, the code around it, the facts, what the checks found."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import NanproofError
from ..records import Finding
from .check import check_settings
from .contradictions import Problem, find_problems
from .dialect import Dialect, dialect_of
from .effective import Effective, find_effective
from .evidence import Facts
from .launch import read_launch
from .loading import SHELL, load
from .meaning import Meaning
from .optimizers import is_adam, optimizer_of
from .project import Project, root_of
from .source import Source
from .value import Plain, Settings, Value, as_number

# What a concept is called where it is not written yet, in the dialects whose reader is known.
_NAMES: dict[str, dict[str, str]] = {
    "transformers": {
        "lr": "learning_rate",
        "warmup_steps": "warmup_steps",
        "clip_norm": "max_grad_norm",
        "fp16": "fp16",
        "bf16": "bf16",
        "accumulation": "gradient_accumulation_steps",
        "save_every": "save_steps",
        "nan_filter": "logging_nan_inf_filter",
        "eps": "adam_epsilon",
    },
    "lightning": {
        "clip_norm": "trainer.gradient_clip_val",
        "accumulation": "trainer.accumulate_grad_batches",
        "mixed_precision": "trainer.precision",
    },
    "deepspeed": {"clip_norm": "deepspeed.gradient_clipping"},
}

# Defaults that are in force when a config for these readers says nothing.
DEFAULTS: dict[str, dict[str, Plain]] = {
    "transformers": {
        "lr": 5e-5,
        "warmup_steps": 0,
        "clip_norm": 1.0,
        "accumulation": 1,
        "save_every": 500,
        "fp16": False,
        "bf16": False,
        "nan_filter": True,
        "eps": 1e-8,
        "beta2": 0.999,
    },
    "lightning": {"accumulation": 1, "mixed_precision": "32-true"},
}


def launch_scripts(path: str) -> list[Path]:
    """The launch scripts of the project that start with this config."""
    config = Path(path)
    found = []
    for script in sorted(p for ending in SHELL for p in root_of(config).glob(f"*{ending}"))[:50]:
        try:
            launch = read_launch(Source.read(script))
        except NanproofError:
            continue
        names = {Path(c).name for c in launch.configs} | {f"{launch.config_name.removesuffix('.yaml')}.yaml"}
        if config.name in names:
            found.append(Path(os.path.relpath(script)) if not config.is_absolute() else script)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One config to be hardened, with all that is known about it."""

    path: str
    settings: Settings
    meaning: Meaning
    project: Project
    facts: Facts
    effective: Effective
    problems: tuple[Problem, ...]
    findings: tuple[Finding, ...]
    dialect: Dialect
    holder: str
    """The call that takes the settings, when the config is a Python script: ``TrainingArguments``."""

    @classmethod
    def of(cls, path: str, project: Project, facts: Facts) -> Case:
        settings = load(path, *launch_scripts(path))
        meaning = Meaning.of(settings)
        effective = find_effective(settings, project)
        calls = {v.key.partition(".")[0] for v in settings if v.origin == "call" and v.path == path}
        holder = next((c for c in sorted(calls) if c.endswith(("Arguments", "Config")) and c != "LoraConfig"), "")
        tool = next((v.origin for v in settings if v.path == path and v.origin in ("accelerate", "deepspeed")), "")
        dialect: Dialect = "transformers" if holder else tool or dialect_of(v.key for v in settings)  # type: ignore[assignment]
        return cls(
            path=path,
            settings=settings,
            meaning=meaning,
            project=project,
            facts=facts,
            effective=effective,
            problems=find_problems(effective, meaning, project),
            findings=check_settings(settings, project),
            dialect=dialect,
            holder=holder,
        )

    def value(self, concept: str) -> Value | None:
        """The setting behind a concept, if it is written anywhere and known."""
        found = self.meaning.get(concept)
        return found if found is not None and found.known else None

    def number(self, concept: str) -> float | None:
        """Its number, or the reader's default."""
        found = self.meaning.number(concept)
        default = DEFAULTS.get(self.dialect, {}).get(concept)
        if found is None and self.value(concept) is None:
            return as_number(default)
        return found

    def key(self, concept: str) -> str | None:
        """The key to change, or to add; None when nobody knows what it would be called here."""
        held = self.value(concept)
        if held is not None:
            return held.key
        name = _NAMES.get(self.dialect, {}).get(concept)
        return f"{self.holder}.{name}" if name and self.holder else name

    @property
    def adam(self) -> bool:
        return is_adam(optimizer_of(self.settings, self.meaning))
