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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from .code import Code

_CONFIG = re.compile(r"(\w*_)?(cfgs?|configs?|conf|args|arguments|hparams|hps|hp|opts|flags|settings)", re.I)
_WRAPPERS = {
    "Namespace", "SimpleNamespace", "EasyDict", "edict", "Munch", "munchify", "AttrDict", "DotDict", "Box", "CfgNode",
    "ConfigDict", "DictConfig", "Config", "create", "merge", "load", "to_container", "to_yaml", "deepcopy", "copy",
    "print", "pprint", "pformat", "info", "debug", "warning", "dumps", "dump", "safe_dump", "save", "init", "log",
    "isinstance", "len", "str", "repr", "type", "hasattr", "getattr", "setattr", "vars", "seed_everything",
    "log_hyperparams", "save_hyperparameters", "set_struct", "resolve", "set_readonly", "open_dict",
}  # fmt: skip
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
    files: int

    @classmethod
    def of(cls, codes: Iterable[Code], words: Iterable[str] = ()) -> Reads:
        """What these files read; ``words`` are names of files that could not be parsed."""
        all_codes = list(codes)
        own = {PurePath(c.path).stem for c in all_codes}
        own |= {part for c in all_codes for part in Path(c.path).parts[:-1]}
        mentioned: set[str] = set(words)
        swallowed: set[str] = set()
        converted: set[str] = set()
        for code in all_codes:
            for node in ast.walk(code.tree):
                _mention(node, mentioned)
                swallowed.update(_swallow(code, node, own))
                _convert(node, converted)
        return cls(frozenset(mentioned), frozenset(swallowed), frozenset(converted), len(all_codes))

    def may_read(self, key: str) -> bool:
        """Whether some line of the code could read this key."""
        *sections, name = key.split(".")
        if name in self.mentioned or name.replace("-", "_") in self.mentioned:
            return True
        return ROOT in self.swallowed or not self.swallowed.isdisjoint(sections)


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


def _swallow(code: Code, node: ast.AST, own: set[str]) -> Iterable[str]:
    """The sections that a node passes on whole."""
    if isinstance(node, ast.For | ast.comprehension):
        held = _section(node.iter)
        return [held] if held is not None else []
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
        held = _section(node.value)
        return [held] if held is not None else []
    if isinstance(node, ast.Dict):
        spread = [v for k, v in zip(node.keys, node.values, strict=True) if k is None]
        return [held for value in spread if (held := _section(value)) is not None]
    if not isinstance(node, ast.Call):
        return []
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("items", "keys", "values", "pop", "update") and isinstance(node.func, ast.Attribute):
        held = _section(node.func.value) if not node.args else None
        return [held] if held is not None else []
    found = []
    for keyword in node.keywords:
        if keyword.arg is None and name not in _WRAPPERS and (held := _section(keyword.value)) is not None:
            found.append(held)
    if name not in _WRAPPERS and _foreign(code, node.func, own):
        plain = [*node.args, *(k.value for k in node.keywords if k.arg)]
        found += [held for value in plain if (held := _section(value)) is not None]
    if name == "getattr" and len(node.args) > 1 and not isinstance(node.args[1], ast.Constant):
        held = _section(node.args[0])
        found += [held] if held is not None else []
    return found


def _foreign(code: Code, callee: ast.expr, own: set[str]) -> bool:
    """Whether a callable comes from outside of the project, where nobody can see what it reads."""
    dotted = code.dotted(callee)
    head = dotted.partition(".")[0]
    written = callee
    while isinstance(written, ast.Attribute):
        written = written.value
    imported = isinstance(written, ast.Name) and written.id in code.imports
    return imported and bool(head) and head not in own and not hasattr(builtins, head)


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
