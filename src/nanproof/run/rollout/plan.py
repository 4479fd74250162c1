"""The plan of a rollout: stages, their gates, and what to do when one fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Style = Literal["dotted", "flags"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A watched value that must stay on one side of a number: ``alpha<0.1``."""

    name: str
    sign: str
    value: float

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The loss must be below a value by a step."""

    value: float
    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """What a stage must show. Without a word: no incident, and a loss that falls smoothly."""

    incidents: int | None = 0
    loss: Literal["falling"] | None = "falling"
    loss_below: Target | None = None
    grad_norm: tuple[float, float] | None = None
    watch: tuple[Limit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """What a failed stage is tried again with, and how often."""

    set: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    retry: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One run of the training, longer or wider than the one before."""

    name: str
    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    set: Mapping[str, str] = field(default_factory=dict)
    steps: int | None = None
    minutes: float = 60.0
    log: str = "{run_dir}"
    gates: Gates = field(default_factory=Gates)
    on_fail: Fallback | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A rollout. ``{run_dir}`` and ``{steps}`` in commands and log paths stand for the stage's own."""

    name: str
    stages: tuple[Stage, ...]
    folder: Path
    """Where stages run, and where relative paths begin: the folder of the plan."""
    out: Path
    style: Style = "dotted"
    """How settings reach the command: ``key=value``, or ``--key value``."""
    digest: str = ""
