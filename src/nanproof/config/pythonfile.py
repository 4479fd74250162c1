"""What a Python file sets, by reading it: constants, config classes, dictionaries, command-line defaults, calls.

>>> text = "lr = 1e-4\\noptimizer = dict(type='AdamW', lr=lr)\\nparser.add_argument('--clip-norm', default=1.0)\\n"
>>> [(v.key, v.value, v.origin) for v in values(Code.parse("c.py", text))]
[('lr', 0.0001, 'python'), ('optimizer.type', 'AdamW', 'python'), ('optimizer.lr', 0.0001, 'python'),
 ('clip_norm', 1.0, 'argparse')]
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from .calls import find_calls
from .code import Code
from .source import MAX_DEPTH
from .value import Origin, Value

_HOLDER = re.compile(r"_C|(\w*_)?(cfg|config|conf|args|hparams|hps|opt|opts|params|flags)", re.I)
_OBJECT = re.compile(r"(Config|Params|Hparams|HParams|Settings)$")
_OPTION = re.compile(r"DEFINE_(float|integer|bool|boolean|string|enum)")


def values(code: Code) -> Iterator[Value]:
    """Every setting of the file, in the order of the source: constants and options first, then calls."""
    yield from _block(code, code.tree.body, "")
    for node in ast.walk(code.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _assigned_attributes(code, node.body)
        elif isinstance(node, ast.Call):
            yield from _option(code, node)
    for call in find_calls(code):
        yield from call.arguments.values()


def _block(code: Code, body: list[ast.stmt], prefix: str, depth: int = 0) -> Iterator[Value]:
    for node in body:
        if isinstance(node, ast.ClassDef) and depth < MAX_DEPTH:
            name = f"{prefix}{node.name}."
            marks = {code.dotted(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
            origin: Origin = "dataclass" if any("dataclass" in m or m.startswith("attr") for m in marks) else "python"
            for value in _block(code, node.body, name, depth + 1):
                yield value if origin == "python" else replace(value, origin=origin)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield from _expression(code, f"{prefix}{target.id}", node.value)
                elif key := _attribute(code, target):
                    yield from _expression(code, key, node.value)


def _assigned_attributes(code: Code, body: list[ast.stmt]) -> Iterator[Value]:
    """``config.optim.lr = 2e-4`` inside get_config()."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if key := _attribute(code, target):
                    yield from _expression(code, key, node.value, constants_only=True)


def _attribute(code: Code, node: ast.expr) -> str:
    dotted = code.dotted(node) if isinstance(node, ast.Attribute) else ""
    head, _, rest = dotted.partition(".")
    return rest if rest and _HOLDER.fullmatch(head) else ""


def _expression(code: Code, key: str, node: ast.expr, depth: int = 0, constants_only: bool = False) -> Iterator[Value]:
    """The settings behind one assignment; dictionaries unfold."""
    pairs = _pairs(node) if depth < MAX_DEPTH else None
    if pairs is not None:
        for name, item in pairs:
            yield from _expression(code, f"{key}.{name}", item, depth + 1, constants_only)
        return
    if isinstance(node, ast.List | ast.Tuple) and any(_pairs(item) is not None for item in node.elts):
        for index, item in enumerate(node.elts):
            yield from _expression(code, f"{key}.{index}", item, depth + 1, constants_only)
        return
    value = code.setting(key, _field(node), "python")
    if value.known or (depth and not constants_only):  # a module is full of names that are no settings
        yield value


def _pairs(node: ast.expr) -> list[tuple[str, ast.expr]] | None:
    if isinstance(node, ast.Dict):
        return [(str(k.value), v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
    if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
        "dict",
        "ConfigDict",
        "SimpleNamespace",
        "Namespace",
        "EasyDict",
        "edict",
        "Munch",
        "AttrDict",
    ):
        inner = node.args[0] if node.args and isinstance(node.args[0], ast.Dict) else None
        return (_pairs(inner) or [] if inner else []) + [(k.arg, k.value) for k in node.keywords if k.arg]
    if isinstance(node, ast.Call) and _OBJECT.search(getattr(node.func, "id", getattr(node.func, "attr", ""))):
        return [(k.arg, k.value) for k in node.keywords if k.arg]
    return None


def _field(node: ast.expr) -> ast.expr:
    """The default inside ``field(default=…)``."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("field", "Field"):
        for keyword in node.keywords:
            if keyword.arg == "default":
                return keyword.value
            if keyword.arg == "default_factory" and isinstance(keyword.value, ast.Lambda):
                return keyword.value.body
        return node.args[0] if node.args else node
    return node


def _option(code: Code, node: ast.Call) -> Iterator[Value]:
    """The default of a command-line option: argparse, click, absl."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    keywords = {k.arg: k.value for k in node.keywords}
    if _OPTION.fullmatch(name) and len(node.args) >= 2 and words:
        key, default = words[0], node.args[1]
    elif name in ("add_argument", "add_arg", "option") and words:
        longs = [w for w in words if w.startswith("--")] or words
        key = longs[0].lstrip("-").replace("-", "_").partition("/")[0]
        dest = keywords.get("dest")
        if isinstance(dest, ast.Constant) and isinstance(dest.value, str):
            key = dest.value
        action = keywords.get("action")
        if "default" in keywords:
            default = keywords["default"]
        elif isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
            default = ast.copy_location(ast.Constant(value=action.value == "store_false"), action)
            yield replace(code.setting(key, default, "argparse"), span=None)
            return
        else:
            return
    else:
        return
    value = code.setting(key, default, "argparse")
    if value.known:
        yield value
