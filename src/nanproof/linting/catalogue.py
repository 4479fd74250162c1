"""All rules, found by listing the folder `rules`, and those of other packages (`nanproof.plugins`).

Rules look at code. The checks of configs, NP7xx, live with the readers of configs and are listed here beside them.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

from ..plugins import plugins
from . import rules as folder
from .rule import Rule

if TYPE_CHECKING:
    from ..config.check import Check


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule about code, by code."""
    names = sorted(m.name for m in pkgutil.iter_modules(folder.__path__) if m.name.startswith("np"))
    own = (importlib.import_module(f"{folder.__name__}.{name}").RULE for name in names)
    return (*own, *plugins("rules", Rule))


def all_checks() -> tuple[Check, ...]:
    """Every check of configs, by code."""
    from ..config.check import checks

    return checks()


def everything() -> tuple[Rule | Check, ...]:
    """Rules and checks, by code."""
    return tuple(sorted([*all_rules(), *all_checks()], key=lambda r: r.code))


NURSERY = frozenset({"NP702", "NP703", "NP705", "NP706", "NP707", "NP709"})
"""Checks of configs that are right too seldom to be on by default; rules say so themselves."""


def is_default(rule: Rule | Check) -> bool:
    return rule.default if isinstance(rule, Rule) else rule.code not in NURSERY


def pages() -> dict[str, str]:
    """The documentation of rules and checks: ``{"NP301.md": …, "README.md": the table of all}``."""
    found = {f"{rule.code}.md": rule.topic.markdown() for rule in everything()}
    marks = {"safe": "safe", "unsafe": "unsafe", "none": "–"}
    rows = [
        f"| [{r.code}]({r.code}.md) | {r.name} | {marks[r.fix]} | {'on' if is_default(r) else 'off'} |"
        for r in everything()
    ]
    head = ["# Rules", "", "What `nanproof lint` looks for; `nanproof explain NP301` prints the same page.", ""]
    table = ["| code | name | fix | by default |", "|---|---|---|---|", *rows, ""]
    return {**found, "README.md": "\n".join([*head, *table])}
