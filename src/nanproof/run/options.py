"""What a run is started with, checked before anything runs."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import Lock, make_folder, write_atomic
from ..guard.checks import positive
from ..guard.options import Records, Watch
from ..guard.policy import Policy

# what can be set with --set, besides the policy: fields of the groups that Guard takes
SETTINGS = {
    "watch": ("modules", "params", "every", "chance", "still_after"),
    "records": ("log_every", "incident_bytes", "keep"),
    "": ("max_norm", "heal"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the guard of a run behaves, and where it writes."""

    run_dir: Path
    run_dir_given: bool = False
    child: bool = False
    """Whether this is a process that the program has started; alone, it keeps its records in a folder of its own."""
    started: bool = False
    """Whether the program is a command that trains nothing itself: the first process of it that does has the folder."""
    require: bool = False
    """End the program, exit code 2, as soon as something that it trains is not guarded."""
    until_guarded: bool = False
    """End the program after its first guarded step."""
    policy: str = "default"
    policy_changes: Mapping[str, Any] = field(default_factory=dict)
    guard: Mapping[str, Any] = field(default_factory=dict)
    """Settings by their dotted names, such as ``watch.every``."""

    def make_policy(self) -> Policy:
        """The policy, with what was set of it."""
        return dataclasses.replace(Policy.named(self.policy), **self.policy_changes)

    def check(self) -> None:
        """Raise `UsageError` for what no guard would take."""
        try:
            self.make_policy()
        except TypeError as error:
            raise UsageError(f"the policy cannot be made: {error}", hint="look at the values of --set") from error
        options = self.guard_options()
        positive(("max_norm",), max_norm=options.get("max_norm"))

    def guard_options(self) -> dict[str, Any]:
        """The settings as arguments of a guard."""
        groups: dict[str, dict[str, Any]] = {"watch": {}, "records": {}, "": {}}
        for name, value in self.guard.items():
            group, _, field_name = name.rpartition(".")
            groups[group][field_name] = value
        return {**groups[""], "watch": Watch(**groups["watch"]), "records": Records(**groups["records"])}

    def claim_folder(self) -> None:
        """Make the run's folder; raise when it cannot be written, or belongs to a run that goes on."""
        try:
            make_folder(self.run_dir)
            with Lock(self.run_dir):
                write_atomic(self.run_dir / "run.json", "{}\n")
        except OSError as error:
            raise UsageError(
                f"{self.run_dir} cannot be written: {error.strerror or error}",
                hint="give --run-dir a folder that can be",
            ) from error


def choose_run_dir(name: str) -> Path:
    """A folder for a run that nobody named: ``runs/NAME-TIME``, and a number if that is taken."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(p for n in itertools.count(1) if not (p := base if n == 1 else Path(f"{base}-{n}")).exists())


def read_settings(settings: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``key=value`` pairs as changes of the policy and options of the guard.

    >>> read_settings(["policy.max_consecutive=3", "policy.share=gradients", "watch.every=10"])
    ({'max_consecutive': 3, 'share': 'gradients'}, {'watch.every': 10})
    """
    fields = [f.name for f in dataclasses.fields(Policy)]
    known = [f"policy.{name}" for name in fields]
    known += [f"{group}.{name}".lstrip(".") for group, names in SETTINGS.items() for name in names]
    policy: dict[str, Any] = {}
    guard: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting} has no value", hint="write --set policy.max_consecutive=5")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise UsageError(f"unknown setting {key!r}", hint=f"use {near[0] if near else ', '.join(known)}")
        home = policy if key.startswith("policy.") else guard
        home[key.removeprefix("policy.")] = _value(text)
    return policy, guard


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
