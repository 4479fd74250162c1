"""What other packages add: objects that they register under an entry point of nanproof.

    [project.entry-points."nanproof.rules"]
    my-rule = "my_package.my_rule:RULE"

Groups: ``nanproof.rules`` (`Rule`), ``nanproof.checks`` (`Check`), ``nanproof.causes`` (`Cause`), ``nanproof.grammars``
(`Grammar`), ``nanproof.trainers`` (a function that is called as those in ``run/trainers.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import UsageError


def plugins(group: str, kind: type | None = None) -> tuple[Any, ...]:
    """The objects that installed packages register in a group, by name; each must be a ``kind``."""
    from importlib.metadata import entry_points

    found = []
    for entry in sorted(entry_points(group=f"nanproof.{group}"), key=lambda e: e.name):
        package = entry.dist.name if entry.dist else entry.module
        hint = f"repair {package}, or: pip uninstall {package}"
        try:
            thing = entry.load()
        except Exception as error:
            raise UsageError(f"plug-in {entry.name} of {package} cannot be loaded: {error}", hint=hint) from error
        if kind is not None and not isinstance(thing, kind):
            wrong = f"{entry.value} is {type(thing).__name__}, not {kind.__name__}"
            raise UsageError(f"plug-in {entry.name} of {package} cannot be used: {wrong}", hint=hint)
        found.append(thing)
    return tuple(found)


def sources_of(group: str) -> tuple[Path, ...]:
    """The files that the plug-ins of a group are defined in: who keeps results must notice a new version of them."""
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    specs = [find_spec(entry.module) for entry in entry_points(group=f"nanproof.{group}")]
    return tuple(Path(spec.origin) for spec in specs if spec is not None and spec.origin)
