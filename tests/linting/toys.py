"""Small rules and files for testing the engine without the real rules."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from nanproof.linting.engine import Checked, Linter
from nanproof.linting.fix import Fixed, fix
from nanproof.linting.rule import Change, Found, Rule
from nanproof.linting.settings import Settings
from nanproof.linting.source import Module

Edits = Callable[[ast.Call, Module], tuple[Change, ...]]


def toy(code: str, call: str, edits: Edits | None = None, *, safe: bool = True, **more: object) -> Rule:
    """A rule that finds every call of one function."""

    def check(node: ast.Call, module: Module) -> Iterator[Found]:
        made = edits(node, module) if edits else ()
        yield Found(node=node, message=f"{call} is called", help="do not", edits=made, safe=safe)

    fields: dict[str, object] = {
        "code": code,
        "name": f"no-{call}",
        "what": "w",
        "why": "y",
        "bad": "",
        "good": "",
        "false_alarm": "f",
        "nodes": (ast.Call,),
        "calls": frozenset({call}),
        "check": check,
        **more,
    }
    return Rule(**fields)  # type: ignore[arg-type]


def renamed(new: str) -> Edits:
    return lambda node, module: (module.replace(node.func, new),)


OLD = toy("NP901", "old", renamed("new"))
BROKEN = toy("NP902", "broken", renamed("bro ken"))
STUBBORN = toy("NP903", "stubborn", renamed("stubborn "))
RISKY = toy("NP904", "risky", renamed("tame"), safe=False)
BOTH = toy("NP905", "outer", lambda node, module: (module.replace(node, f"inner({module.source(node.args[0])})"),))
NEEDY = toy(
    "NP906", "needy", lambda node, module: (module.replace(node.func, "math.sqrt"), module.import_line("import math"))
)
PLAIN = toy("NP907", "plain")
TOYS = (OLD, BROKEN, STUBBORN, RISKY, BOTH, NEEDY, PLAIN)


def linter(*rules: Rule, **settings: object) -> Linter:
    return Linter([], rules or TOYS, Settings(**settings))  # type: ignore[arg-type]


def checked(text: str | bytes, *rules: Rule, path: str = "a.py") -> Checked:
    return linter(*rules).data(Path(path), text if isinstance(text, bytes) else text.encode())


def repaired(text: str | bytes, *rules: Rule, unsafe: bool = False, path: str = "a.py") -> Fixed:
    data = text if isinstance(text, bytes) else text.encode()
    return fix(linter(*rules), Path(path), data, unsafe=unsafe)
