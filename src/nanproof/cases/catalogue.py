"""The cases by name, and what is known of each."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import UsageError

if TYPE_CHECKING:
    from .claims import Claim

Variant = Literal["original", "advised", "stable"]
VARIANTS: tuple[Variant, ...] = ("original", "advised", "stable")

_FOLDERS = ("mm_ldlm", "radiodiff", "lora_sft", "restran_mhc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that the stable variant does differently."""

    before: str
    after: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """Something that the users of the system asked for, and the command that shows it."""

    number: str
    wish: str
    shown_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training system that died, as a small program that dies in the same way.

    >>> find("radiodiff").command("original", seed=1, steps=50)[1:]
    ['-m', 'nanproof.cases.radiodiff.train', '--config-name', 'original', '--seed', '1', '--steps', '50']
    """

    name: str
    title: str
    """What the system is, and what killed it."""
    within: int
    """The original is dead within so many steps, whatever the seed."""
    cause: str
    """The name of the cause of the original's death, as diagnose has it."""
    mechanism: str
    """How the located operation broke, as locate has it."""
    step: str
    """The step again, for ``nanproof locate --step``."""
    code: tuple[str, ...]
    """Files that hold the risky code."""
    changes: tuple[Change, ...]
    requirements: tuple[Requirement, ...]
    facts: tuple[str, ...] = ()
    """What only its user knows, as ``nanproof harden --fact`` takes it."""

    @property
    def module(self) -> str:
        return f"nanproof.cases.{self.name.replace('-', '_')}"

    @property
    def folder(self) -> Path:
        return Path(__file__).parent / self.name.replace("-", "_")

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What its post-mortem recommended, each with a way to find out what it does."""
        found: tuple[Claim, ...] = importlib.import_module(f"{self.module}.claims").CLAIMS
        return found

    def command(
        self,
        config: str,
        *,
        seed: int = 0,
        steps: int | None = None,
        device: str | None = None,
        out: Path | None = None,
        overrides: Sequence[str] = (),
    ) -> list[str]:
        """The command line that trains one variant."""
        words = [sys.executable, "-m", f"{self.module}.train", "--config-name", config, "--seed", str(seed)]
        words += ["--steps", str(steps)] if steps is not None else []
        words += ["--device", device] if device is not None else []
        words += ["--out", str(out)] if out is not None else []
        return [*words, *overrides]


def find_all() -> list[Case]:
    """The cases, in the order in which they came to us."""
    return [importlib.import_module(f"{__package__}.{folder}").CASE for folder in _FOLDERS]


def find(name: str) -> Case:
    """The case of this name."""
    folder = name.replace("-", "_")
    if folder not in _FOLDERS:
        names = [f.replace("_", "-") for f in _FOLDERS]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the cases are {', '.join(names)}"
        raise UsageError(f"unknown case {name!r}", hint=hint)
    found: Case = importlib.import_module(f"{__package__}.{folder}").CASE
    return found
