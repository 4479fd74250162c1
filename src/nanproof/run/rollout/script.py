"""What a training script can do, read off its code and that of the project's modules that it imports.

>>> script = read_script("parser.add_argument('--lr', type=float, default=3e-4)", Path("train.py"))
>>> script.parallel, script.style, script.key, script.rate
(False, 'flags', 'lr', 0.0003)
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...files import file_bytes, file_text

FILES = 200  # of a project that are read
LARGEST = 1 << 20  # bytes of one of them
_RATE = re.compile(r"(?:--)?((?:base|max|peak|init)?[-_]?(?:lr|learning[-_]?rate))", re.I)
_SHARED = {
    "DistributedDataParallel",
    "DDP",
    "fully_shard",
    "FullyShardedDataParallel",
    "FSDP",
    "init_process_group",
    "init_device_mesh",
    "Accelerator",
    "Fabric",
    "deepspeed",
    "LOCAL_RANK",
}
_JOINS = {"init_process_group", "init_device_mesh", "deepspeed"}
_TRAINERS = ("transformers", "trl", "lightning", "pytorch_lightning", "composer", "torchtitan")
_SPAWNS = {"mp.spawn", "multiprocessing.spawn", "start_processes", "notebook_launcher", "TorchTrainer"}
_DATACLASSES = {"HfArgumentParser", "tyro", "simple_parsing", "fire"}  # fields and parameters are options
_DOTTED = {"hydra", "from_cli", "from_dotlist"}
_SUMS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What its code tells."""

    parallel: bool
    """Whether several processes would share an update."""
    joins: bool
    """Whether it joins a process group itself: that needs a launcher's variables, also for one process."""
    spawns: bool
    """Whether it starts them itself."""
    style: Literal["dotted", "flags"]
    key: str | None
    """What its learning rate is called on the command line; None when it takes none."""
    rate: float | None
    """The learning rate that it would use."""


def read_script(text: str, path: Path) -> Script:
    """Read a script and the modules beside it that it imports."""
    trees = list(_trees(text, path))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    words = {word for node in nodes for word in _words(node)}
    known = {k: v for node in nodes if isinstance(node, ast.Assign) for k, v in _constants(node)}
    rates = [(name, _number(value, known)) for node in nodes for name, value in _fields(node)]
    own = next((rate for _, rate in rates if rate is not None), None)
    key, rate = next(_options(nodes, known), (None, None))
    style: Literal["dotted", "flags"] = "flags" if key is not None or not words & _DOTTED else "dotted"
    if key is None and words & _DATACLASSES:
        fields = ({"learning_rate": 5e-5} if "TrainingArguments" in words else {}) | dict(reversed(rates))
        key, rate = next(iter(fields.items()), (None, None))
    configs = _configs(nodes, path)
    if key is None and style == "dotted":
        key, rate = next(((k, v) for place, prefix in configs for k, v in _rates_in(place, prefix)), (None, None))
    if rate is None:
        rate = next((v for place, _ in configs for _, v in _rates_in(place, "")), own)
    return Script(
        parallel=bool(words & _SHARED) or any(map(_is_trainer, nodes)),
        joins=bool(words & _JOINS),
        spawns=bool(words & _SPAWNS),
        style=style if key is not None else "dotted",
        key=key,
        rate=rate,
    )


def _trees(text: str, path: Path) -> Iterator[ast.Module]:
    """The script, then what it imports from its own folder, the current one, or a package there."""
    waiting: list[tuple[str, Path]] = [(text, path)]
    seen = {path.absolute()}
    while waiting and len(seen) <= FILES:
        source, place = waiting.pop(0)
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        yield tree
        for name in (name for node in ast.walk(tree) for name in _imported(node)):
            for folder in dict.fromkeys((place.parent, path.parent, Path())):
                stem = folder / name.replace(".", "/")
                for file in (stem.with_suffix(".py"), stem / "__init__.py"):
                    if file.absolute() not in seen and file.is_file() and file.stat().st_size < LARGEST:
                        seen.add(file.absolute())
                        waiting.append((file_text(file, errors="replace"), file))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        yield from ([base] if base else [])
        yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _words(node: ast.AST) -> Iterator[str]:
    """The names that a node uses, and short strings: environment variables among them."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
        yield f"{node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, 'attr', '')}.{node.attr}"
    elif isinstance(node, ast.alias):
        yield node.name.partition(".")[0]
        yield node.name
    elif isinstance(node, ast.ImportFrom):
        yield (node.module or "").partition(".")[0]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 20:
        yield node.value


def _is_trainer(node: ast.AST) -> bool:
    """Whether it takes the trainer of a library, which knows about processes; a class of the project's own does not."""
    if isinstance(node, ast.ImportFrom):
        library = (node.module or "").partition(".")[0] in _TRAINERS and not node.level
        return library and any(alias.name.endswith("Trainer") for alias in node.names)
    short = ("L", "pl", *_TRAINERS)
    return (
        isinstance(node, ast.Attribute)
        and node.attr.endswith("Trainer")
        and isinstance(node.value, ast.Name)
        and node.value.id in short
    )


def _constants(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))


def _number(node: ast.AST | None, known: dict[str, ast.expr], depth: int = 0) -> float | None:
    """A number that the code spells out: 3e-4, 1 / 64, "1e-3", or a name for one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str) and node.value is not True:
        try:
            return float(node.value) or None
        except ValueError:
            return None
    if isinstance(node, ast.Name) and depth < 5:
        return _number(known.get(node.id), known, depth + 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS and depth < 5:
        left, right = (_number(part, known, depth + 1) for part in (node.left, node.right))
        try:
            return None if left is None or right is None else _SUMS[type(node.op)](left, right)
        except (ArithmeticError, ValueError):
            return None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand, known, depth + 1)
        return -inner if inner is not None else None
    return None


def _options(nodes: Sequence[ast.AST], known: dict[str, ast.expr]) -> Iterator[tuple[str, float | None]]:
    """Options of a parser that are a learning rate, the plainest name first, and their defaults."""
    found: list[tuple[str, float | None]] = []
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        flag = next((name[2:] for name in names if name.startswith("--") and _RATE.fullmatch(name)), None)
        if flag is not None:
            given = [k.value for k in call.keywords if k.arg == "default"] or list(call.args)
            found.append((flag, next((v for n in given if (v := _number(n, known)) is not None), None)))
    yield from sorted(found, key=lambda option: len(option[0].strip("-_")) not in (2, 12, 13))


def _fields(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Fields, parameters, names and keywords that are a learning rate, with what they are set to."""
    pairs: list[tuple[str, ast.expr | None]] = []
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        pairs = [(node.target.id, node.value)]
    elif isinstance(node, ast.Assign):
        pairs = list(_constants(node))
    elif isinstance(node, ast.Call):
        pairs = [(k.arg or "", k.value) for k in node.keywords]
    elif isinstance(node, ast.FunctionDef):
        named = [*node.args.posonlyargs, *node.args.args]
        pairs = list(
            zip((a.arg for a in named[len(named) - len(node.args.defaults) :]), node.args.defaults, strict=True)
        )
        pairs += list(zip((a.arg for a in node.args.kwonlyargs), node.args.kw_defaults, strict=True))
    elif isinstance(node, ast.Dict):
        keys = [k.value if isinstance(k, ast.Constant) and isinstance(k.value, str) else "" for k in node.keys]
        pairs = list(zip(keys, node.values, strict=True))
    yield from ((name, value) for name, value in pairs if value is not None and _RATE.fullmatch(name))


def _configs(nodes: Sequence[ast.AST], path: Path) -> list[tuple[Path, str]]:
    """Configs that a script names, and those of Hydra's folder with the group that each belongs to."""
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and len(n.value) < 200]
    folders = dict.fromkeys((path.parent, Path()))
    named = [folder / text for text in texts if text.endswith((".yaml", ".yml", ".json")) for folder in folders]
    found = [(place, "") for place in named if place.is_file()]
    for call in (n for n in nodes if isinstance(n, ast.Call)):
        given = {
            k.arg: str(k.value.value) for k in call.keywords if isinstance(k.value, ast.Constant) and k.value.value
        }
        if "config_path" in given:
            root = path.parent / given["config_path"]
            first = given.get("config_name", "config").removesuffix(".yaml")
            files = sorted(root.rglob("*.yaml"), key=lambda f: (f != root / f"{first}.yaml", len(f.parts), f))[:FILES]
            groups = [f.relative_to(root).parent.as_posix().replace("/", ".").strip(".") for f in files]
            found += [(f, group) for f, group in zip(files, groups, strict=True) if group or f.stem == first]
    return found


def _rates_in(place: Path, prefix: str) -> Iterator[tuple[str, float]]:
    """The learning rates of a config: dotted key and value."""
    import yaml

    try:
        data = yaml.safe_load(file_bytes(place)) if place.stat().st_size < LARGEST else None
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return
    yield from _walk(data, prefix)


def _walk(data: Any, prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in data.items() if isinstance(data, dict) else ():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            yield from _walk(value, name)
        elif _RATE.fullmatch(str(key)) and (number := _number(ast.Constant(value), {})) is not None:
            yield name, number
