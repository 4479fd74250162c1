"""Which settings the code of a project can possibly read.

Names are taken generously: an attribute, a subscript, a parameter, a keyword, any string. A key that none of them
mentions can only be read by code that takes a whole section without naming its keys: ``Adam(**cfg.optimizer)``,
``instantiate(cfg.model)``, ``for key in cfg``. Those sections are `swallowed`, and nothing is said about their keys.

>>> from .code import Code
>>> text = "import torch\\nopt = torch.optim.Adam(p, **cfg.optimizer)\\nclip(cfg.train.grad_clip)\\n"
>>> reads = Reads.of([Code.parse("t.py", text)])
>>> reads.may_read("optimizer.amsgrad"), reads.may_read("train.grad_clip"), reads.may_read("train.accumulate")
(True, True, False)
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

from .code import Code

_CONFIG = re.compile(r"(\w*_)?(cfgs?|configs?|conf|args|arguments|hparams|hps|hp|opts|flags|settings)", re.I)
_WRAPPERS = {
    "Namespace",
    "SimpleNamespace",
    "EasyDict",
    "edict",
    "Munch",
    "munchify",
    "AttrDict",
    "DotDict",
    "Box",
    "CfgNode",
    "ConfigDict",
    "DictConfig",
    "Config",
    "create",
    "merge",
    "load",
    "to_container",
    "to_yaml",
    "deepcopy",
    "copy",
    "print",
    "pprint",
    "pformat",
    "info",
    "debug",
    "warning",
    "dumps",
    "dump",
    "safe_dump",
    "save",
    "init",
    "log",
    "isinstance",
    "len",
    "str",
    "repr",
    "type",
    "hasattr",
    "getattr",
    "setattr",
    "vars",
    "seed_everything",
    "log_hyperparams",
    "save_hyperparameters",
    "set_struct",
    "resolve",
    "set_readonly",
    "open_dict",
}
_WORD = re.compile(r"[A-Za-z_]\w*")
ROOT = ""


@dataclass(frozen=True, slots=True)
class Reads:
    """The names in a project's code, and the sections that are handed on whole."""

    mentioned: frozenset[str]
    swallowed: frozenset[str]
    """Names of sections; `ROOT` when a whole config is handed on."""
    converted: frozenset[str]
    """Names inside ``float(…)`` and its like, and options of the command line with ``type=float``."""
    packages: frozenset[str]
    """Packages outside of the project that classes of it are derived from."""
    files: int

    @classmethod
    def of(cls, codes: Iterable[Code], words: Iterable[str] = ()) -> Reads:
        """What these files read; ``words`` are names of files that could not be parsed."""
        all_codes = list(codes)
        own = {PurePath(c.path).stem for c in all_codes}
        own |= {part for c in all_codes for part in Path(c.path).parts[:-1]}
        found = [_names_of(code) for code in all_codes]
        return cls(
            mentioned=frozenset(words).union(*(f.mentioned for f in found)),
            swallowed=frozenset(s for f in found for s, package in f.swallowed if package not in own),
            converted=frozenset().union(*(f.converted for f in found)),
            packages=frozenset().union(*(f.packages for f in found)) - own,
            files=len(all_codes),
        )

    def may_read(self, key: str) -> bool:
        """Whether some line of the code could read this key."""
        *sections, name = key.split(".")
        if name in self.mentioned or name.replace("-", "_") in self.mentioned:
            return True
        return ROOT in self.swallowed or not self.swallowed.isdisjoint(sections)


class _Names(NamedTuple):
    """What one file reads."""

    mentioned: set[str]
    swallowed: set[tuple[str, str]]
    """Sections, and the package that takes one; '' where it does not matter who does."""
    converted: set[str]
    packages: set[str]


def _names_of(code: Code) -> _Names:
    """What a file reads, found out once."""
    known: _Names | None = code.memory.get("names")
    if known is not None:
        return known
    found = code.memory["names"] = _Names(set(), set(), set(), set())
    roots = {
        a.asname or a.name: node.module.partition(".")[0]
        for node in code.nodes
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for a in node.names
    }
    for node in code.nodes:
        _mention(node, found.mentioned)
        found.swallowed.update(_swallow(code, node))
        _convert(node, found.converted)
        if isinstance(node, ast.ClassDef):
            found.packages.update(roots[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in roots)
    return found


def _mention(node: ast.AST, mentioned: set[str]) -> None:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
            mentioned.add(name)
        case ast.keyword(arg=str(name)):
            mentioned.add(name)
        case ast.alias(name=name):
            mentioned.update(name.split("."))
        case ast.Constant(value=str(text)) if len(text) < 200:
            mentioned.add(text)
            mentioned.update(_WORD.findall(text))


def _convert(node: ast.AST, converted: set[str]) -> None:
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("float", "eval", "literal_eval", "Decimal"):
        for argument in node.args:
            for below in ast.walk(argument):
                _mention(below, converted)
    elif name == "add_argument" and any(k.arg == "type" for k in node.keywords):
        words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        converted.update(w.lstrip("-").replace("-", "_") for w in words)


def _swallow(code: Code, node: ast.AST) -> Iterator[tuple[str, str]]:
    """The sections that a node passes on whole, each with the package that it is passed to, if that matters."""
    values: list[ast.expr] = []
    if isinstance(node, ast.For | ast.comprehension):
        values = [node.iter]
    elif isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
        values = [node.value]
    elif isinstance(node, ast.Dict):
        values = [v for k, v in zip(node.keys, node.values, strict=True) if k is None]
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("items", "keys", "values", "pop", "update") and isinstance(node.func, ast.Attribute):
            values = [] if node.args else [node.func.value]
        else:
            if name not in _WRAPPERS:
                values = [k.value for k in node.keywords if k.arg is None]
                plain = [*node.args, *(k.value for k in node.keywords if k.arg)]
                held = [section for value in plain if (section := _section(value)) is not None]
                package = _package(code, node.func) if held else ""
                yield from ((section, package) for section in held if package)
            if name == "getattr" and len(node.args) > 1 and not isinstance(node.args[1], ast.Constant):
                values.append(node.args[0])
    yield from ((section, "") for value in values if (section := _section(value)) is not None)


def _package(code: Code, callee: ast.expr) -> str:
    """The package that a callable is imported from; '' for what is defined here or built in."""
    head = code.dotted(callee).partition(".")[0]
    while isinstance(callee, ast.Attribute):
        callee = callee.value
    imported = isinstance(callee, ast.Name) and callee.id in code.imports
    return head if imported and not hasattr(builtins, head) else ""


def _section(node: ast.expr) -> str | None:
    """The name of the section that an expression stands for; `ROOT` for a whole config; None for all else."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("vars", "dict", "asdict") and node.args:
        return _section(node.args[0])
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("to_container", "_asdict", "items", "to_dict"):
        return _section(node.args[0] if node.args else node.func.value)  # type: ignore[attr-defined]
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            parts.append(str(node.slice.value))
            node = node.value
        else:
            break
    if not isinstance(node, ast.Name):
        return None
    parts.append(node.id)
    places = [i for i, part in enumerate(parts) if _CONFIG.fullmatch(part)]
    if not places:
        return None
    return ROOT if places[0] == 0 else parts[0]
