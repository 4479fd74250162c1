"""What a run is started with, checked before anything runs."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import itertools
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import Lock
from ..guard.policy import Policy

# what can be set for a guard that is not made by hand; the rest is found in the script
GUARD_OPTIONS = (
    "chance", "deadline", "every", "incident_bytes", "keep", "locate_seconds", "log_every", "max_norm", "share",
    "snapshot_every", "watch_modules", "watch_params", "window",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the guard of a run behaves, and where it writes."""

    run_dir: Path
    run_dir_given: bool = False
    policy: str = "default"
    policy_changes: Mapping[str, Any] = field(default_factory=dict)
    guard: Mapping[str, Any] = field(default_factory=dict)

    def make_policy(self) -> Policy:
        """The policy, with what was set of it."""
        return dataclasses.replace(Policy.named(self.policy), **self.policy_changes)

    def check(self) -> None:
        """Raise `UsageError` for what no guard would take."""
        try:
            self.make_policy()
        except TypeError as error:
            raise UsageError(f"the policy cannot be made: {error}", hint="look at the values of --set") from error
        numbers = {k: v for k, v in self.guard.items() if k not in ("share", "watch_modules", "watch_params")}
        for name, value in numbers.items():
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise UsageError(f"{name} is {value}", hint="give a positive number")

    def check_folder(self) -> None:
        """Raise when the run's folder cannot be written, or belongs to a run that goes on."""
        there = next(p for p in (self.run_dir, *self.run_dir.absolute().parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UsageError(f"{self.run_dir} cannot be written", hint="give --run-dir a folder that can be")
        if self.run_dir.is_dir():
            lock = Lock(self.run_dir)
            lock.acquire()
            lock.release()


def choose_run_dir(name: str) -> Path:
    """A folder for a run that nobody named: ``runs/NAME-TIME``, and a number if that is taken."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(p for n in itertools.count(1) if not (p := base if n == 1 else Path(f"{base}-{n}")).exists())


def read_settings(settings: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``key=value`` pairs as changes of the policy and options of the guard.

    >>> read_settings(["policy.max_consecutive=3", "window=64", "snapshot_every=None", "share=gradients"])
    ({'max_consecutive': 3}, {'window': 64, 'snapshot_every': None, 'share': 'gradients'})
    """
    fields = [f.name for f in dataclasses.fields(Policy)]
    known = [f"policy.{name}" for name in fields] + list(GUARD_OPTIONS)
    policy: dict[str, Any] = {}
    guard: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting} has no value", hint="write --set policy.max_consecutive=5")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise UsageError(f"there is no setting {key!r}", hint=f"use {near[0] if near else ', '.join(known)}")
        home = policy if key.startswith("policy.") else guard
        home[key.removeprefix("policy.")] = _value(text)
    return policy, guard


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
