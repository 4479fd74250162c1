"""What of a program can be changed from outside, and how: words, flags, variables, configs, its code.

    surface = read_surface(read_command(["python", "train.py", "--config", "c.yaml"]), Path("."))
    surface.meaning.number("lr")            # 0.1
    surface.edit(surface.meaning.get("lr"), 0.05)   # the edit that changes it, by the best way there is

Nothing is imported or run to find out: code, configs and the command line are read.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from ..config.code import Code
from ..config.edits import set_value
from ..config.launch import read_launch
from ..config.literals import write
from ..config.loading import TREES, load
from ..config.meaning import Meaning
from ..config.source import Source
from ..config.value import Plain, Settings, Value, show
from ..errors import NanproofError
from ..files import file_bytes
from .change import Edit
from .command import Command

MAX_FILES = 80
"""Files of a project that are read; the script comes first, then what it imports."""
_HEAVY = {
    "torch": ("torch", "torch._dynamo", "torch.optim", "nanproof.run.session", "nanproof.cli.run"),
    "transformers": ("transformers", "transformers.trainer", "transformers.modeling_utils"),
    "accelerate": ("accelerate",),
    "peft": ("peft",),
    "torchvision": ("torchvision",),
}
_ARGUMENTS = re.compile(rb"\bHfArgumentParser\b")
_SEEDS = ("manual_seed", "seed_everything", "set_seed", "seed_all")
_STEPS = re.compile(r"(^|\.)((max|num|n|total|train|training)_)?(train_|training_)?(steps|iters|iterations|updates)$")


class _Said(TypedDict):
    setting: str
    before: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A command-line option of the program."""

    flag: str
    kind: str
    """value, store_true, store_false or both (``--amp`` and ``--no-amp``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Everything that can be changed."""

    command: Command
    folder: Path
    settings: Settings
    meaning: Meaning
    codes: tuple[Code, ...]
    options: Mapping[str, Option]
    """By destination."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the code reads, with their defaults."""
    takes_words: bool = False
    """Whether it takes ``key=value``."""
    takes_arguments: bool = False
    """Whether the fields of HF's TrainingArguments are flags."""
    read: Mapping[Path, bytes] = field(default_factory=dict)
    """The files as they were when the search began: one that was edited since is not changed."""

    def edit(self, value: Value, after: Plain) -> Edit | None:
        """The edit that gives a setting another value; None when there is no way that is understood."""
        said = _Said(setting=value.label, before=show(value.value) if value.known else value.text)
        if self._is_word(value):
            return Edit(route="word", name=value.label, text=_typed(after), **said)
        option = self.options.get(value.key)
        if option is not None and value.origin in ("argparse", "command-line"):
            return self._flag(option, after, said)
        if value.origin == "command-line":
            flag = self._spelled(value.key)
            return Edit(route="flag", name=flag, text=_typed(after), **said) if flag else None
        if value.origin == "environment" and value.key.upper() in self.variables:
            return Edit(route="variable", name=value.key.upper(), text=_typed(after), **said)
        return self._in_file(value, after, said)

    def add(self, key: str, after: Plain) -> Edit | None:
        """The edit that sets what is not set yet; only where the program is known to take it."""
        if self.takes_arguments:
            return Edit(route="flag", name=f"--{key}", text=_typed(after), setting=key)
        return None

    def imports(self) -> tuple[str, ...]:
        """Heavy modules that the program is going to import."""
        named = {name.partition(".")[0] for code in self.codes for name in code.imports.values()}
        return tuple(m for top, modules in _HEAVY.items() if top == "torch" or top in named for m in modules)

    def schedule(self) -> int | None:
        """How many steps the program means to make, if that is written anywhere."""
        known = self.meaning.number("max_steps")
        if known and known > 0:
            return int(known)
        found = [v for v in self.settings if v.known and v.number and _STEPS.search(v.key.lower())]
        found = [v for v in found if not re.search(r"warm|save|log|eval|accum|decay|pretrain|dead", v.key.lower())]
        return int(found[0].number or 0) or None if found else None

    def seed(self, seed: int) -> Edit | None:
        """The edit that gives the program another seed."""
        if (option := self.options.get("seed")) is not None:
            return Edit(route="flag", name=option.flag, text=str(seed), setting="seed")
        held = self.meaning.get("seed")
        if held is not None and (edit := self.edit(held, seed)) is not None:
            return edit
        if (edit := self.add("seed", seed)) is not None:
            return edit
        for code in self.codes:
            for node in ast.walk(code.tree):
                if isinstance(node, ast.Call) and code.dotted(node.func).endswith(_SEEDS) and node.args:
                    span = code.span(node.args[0])
                    if span and isinstance(node.args[0], ast.Constant):
                        return Edit(
                            route="file", name=code.path, text=str(seed), start=span[0], end=span[1], setting="seed"
                        )
        return None

    def _is_word(self, value: Value) -> bool:
        if not self.takes_words or value.key.startswith(("accelerate.", "deepspeed.")):
            return False
        return value.origin in ("yaml", "json", "toml") or (
            value.origin == "command-line" and any(a.lstrip("+").startswith(f"{value.key}=") for a in self._words)
        )

    @property
    def _words(self) -> tuple[str, ...]:
        return self.command.arguments

    def _spelled(self, key: str) -> str:
        for word in self._words:
            name = word.partition("=")[0]
            if name.startswith("--") and name.lstrip("-").replace("-", "_") == key:
                return name
        return ""

    def _flag(self, option: Option, after: Plain, said: _Said) -> Edit | None:
        if option.kind == "value":
            return Edit(route="flag", name=option.flag, text=_typed(after), **said)
        if option.kind == "both":
            name = option.flag if after else option.flag.replace("--", "--no-", 1)
            return Edit(route="flag", name=name, **said)
        wanted = bool(after) == (option.kind == "store_true")
        return Edit(route="flag", name=option.flag, remove=not wanted, **said)

    def _in_file(self, value: Value, after: Plain, said: _Said) -> Edit | None:
        if not value.path or value.span is None or not value.known:
            return None
        path = str((self.folder / value.path).absolute())
        if path.endswith(".py"):
            start, end = value.span
            text = _code(value, after)
            return None if text is None else Edit(route="file", name=path, text=text, start=start, end=end, **said)
        try:
            old = Source.read(path)
            new = set_value(old, value.label, after)
        except NanproofError:
            return None
        start, end, text = difference(old.whole.encode(), new.whole.encode())
        return Edit(route="file", name=path, text=text, start=start, end=end, **said)


def _typed(value: Plain) -> str:
    """A value on the command line; a float as YAML knows it, where 3e-05 is a word: ``3.0e-05``."""
    return write(value, "yaml") if isinstance(value, float) else show(value)


def _code(value: Value, after: Plain) -> str | None:
    """A Python expression: a dtype keeps the spelling of the one it replaces."""
    if isinstance(after, str) and isinstance(value.value, str) and "float" in after and "." in value.text:
        return f"{value.text.rpartition('.')[0]}.{after}"
    return write(after, "python", value.text)


def difference(old: bytes, new: bytes) -> tuple[int, int, str]:
    """The one range of bytes in which two texts differ, and what stands there now.

    >>> difference(b"lr: 0.1  # peak", b"lr: 0.05  # peak")
    (6, 7, '05')
    """
    start = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    same = 0
    while same < min(len(old), len(new)) - start and old[-1 - same] == new[-1 - same]:
        same += 1
    while start and old[start : start + 1] and old[start] & 0xC0 == 0x80:  # not inside of a character
        start -= 1
    return start, len(old) - same, new[start : len(new) - same].decode(errors="replace")


def read_surface(command: Command, folder: Path) -> Surface:
    """Read the program: its script, what that imports from beside it, and its configs."""
    script = command.script(folder)
    codes = tuple(_project(script, folder)) if script is not None else ()
    words = [a for a in command.arguments if re.match(r"[+~]{0,2}[A-Za-z_][\w./@-]*=", a)]
    launch = read_launch(Source("command.sh", shlex.join(["python", "program.py", *command.arguments])))
    configs = list(_configs(command, folder, script, codes, launch.config_name))
    takes_words = bool(words) or any(map(_takes_words, codes))
    settings = _load([*configs, *(Path(c.path) for c in codes)], words if takes_words else [], folder)
    merged = {**settings.values, **{v.key: v for v in launch.values}}
    variables = {name: default for code in codes for name, default in _variables(code)}
    for name, default in variables.items():
        value = Value(key=name.lower(), value=_number(default), path="", line=0, text=default, origin="environment")
        merged.setdefault(value.key, value)
    settings = Settings(values=merged, history=settings.history, notes=settings.notes, codes=settings.codes)
    return Surface(
        command=command,
        folder=folder,
        settings=settings,
        meaning=Meaning.of(settings),
        codes=codes,
        options={dest: option for code in reversed(codes) for dest, option in _options(code)},
        variables=variables,
        takes_words=takes_words,
        takes_arguments=any(code.mentions(_ARGUMENTS) for code in codes),
        read=_contents(folder, {*(c.path for c in codes), *(v.path for v in settings if v.path)}),
    )


def _contents(folder: Path, names: Iterable[str]) -> dict[Path, bytes]:
    return {path: file_bytes(path) for name in names if (path := (folder / name).resolve()).is_file()}


def _load(paths: Iterable[Path], words: list[str], folder: Path) -> Settings:
    good, bad = [], []
    for path in paths:  # one broken file must not hide the others
        try:
            load(path)
            good.append(path)
        except NanproofError as error:
            bad.append(error.message)
    try:
        found = load(*good, overrides=words)
    except NanproofError:
        found = load(*good)
    return Settings(values=found.values, history=found.history, notes=(*found.notes, *bad), codes=found.codes)


def _number(text: str) -> Plain:
    from ..config.overrides import plain

    return plain(text)


def _project(script: Path, folder: Path) -> Iterator[Code]:
    """The script and the modules of the same project that it imports, breadth first."""
    top = script.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    roots = [script.parent, folder, top]
    waiting, seen = [script], set[Path]()
    while waiting and len(seen) < MAX_FILES:
        path = waiting.pop(0).absolute()
        if path in seen:
            continue
        seen.add(path)
        try:
            code = Code.read(path)
        except NanproofError:
            continue
        yield code
        waiting += list(_imported(code, path, roots))


def _imported(code: Code, path: Path, roots: list[Path]) -> Iterator[Path]:
    for node in ast.walk(code.tree):
        if isinstance(node, ast.Import):
            names = [(name.name, 0) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [(f"{base}.{n.name}".strip("."), node.level) for n in node.names] + [(base, node.level)]
        else:
            continue
        for name, level in names:
            places = [path.parents[level - 1]] if level else roots
            inside = Path(*name.split(".")) if name else Path("__init__")
            for root in places:
                for found in (root / inside.with_suffix(".py"), root / inside / "__init__.py"):
                    if name and found.is_file() and found.name != "__init__.py":
                        yield found


def _configs(command: Command, folder: Path, script: Path | None, codes: tuple[Code, ...], name: str) -> Iterator[Path]:
    """The config files that the command or the code names."""
    hydra = next((found for code in codes for found in _hydra(code)), None)
    if (name or hydra) and script is not None:
        home, own = hydra or (script.parent, "")
        roots = [home, *(r / p for p in ("conf", "config", "configs", ".") for r in (script.parent, folder))]
        for path in (r / f"{(name or own).removesuffix('.yaml')}.yaml" for r in roots):
            if path.is_file():
                yield path
                return
    words = [w.rpartition("=")[2] for w in command.arguments]
    named = [folder / w for w in words if Path(w).suffix in TREES and (folder / w).is_file()]
    if named:
        yield from named
        return
    for code in codes[:10]:
        for node in ast.walk(code.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
                for root in (folder, Path(code.path).parent):
                    if Path(node.value).suffix in TREES and (root / node.value).is_file():
                        yield root / node.value


def _hydra(code: Code) -> Iterator[tuple[Path, str]]:
    """The folder and name of the config that ``@hydra.main(config_path="conf", config_name="train")`` reads."""
    for node in ast.walk(code.tree):
        if isinstance(node, ast.Call) and code.dotted(node.func) == "hydra.main":
            said = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            if said.get("config_name"):
                yield Path(code.path).parent / str(said.get("config_path") or "."), str(said["config_name"])


def _takes_words(code: Code) -> bool:
    """Whether a program takes ``key=value``: Hydra, OmegaConf, or an argument that says so."""
    for node in ast.walk(code.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = code.dotted(node)
            if name in ("hydra.main", "omegaconf.OmegaConf.from_cli", "omegaconf.OmegaConf.from_dotlist"):
                return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            said = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
            if said.get("nargs") in ("*", "+", "...") and (
                "=" in str(said.get("metavar", "")) or re.search(r"overrid|opts|dotlist", str(first))
            ):
                return True
    return False


def _options(code: Code) -> Iterator[tuple[str, Option]]:
    """The options that argparse or click defines."""
    for node in ast.walk(code.tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in ("add_argument", "add_arg", "option"):
            continue
        flags = [str(a.value) for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")]
        if not flags:
            continue
        said = {k.arg: k.value for k in node.keywords}
        action = said.get("action")
        kind = "value"
        if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
            kind = str(action.value)
        elif (action is not None and "BooleanOptional" in code.text(action)) or "/" in flags[0]:
            kind = "both"
        elif isinstance(said.get("is_flag"), ast.Constant):
            kind = "store_true"
        dest = said.get("dest")
        key = str(dest.value) if isinstance(dest, ast.Constant) else flags[0].lstrip("-").replace("-", "_")
        yield key.partition("/")[0], Option(flag=flags[0].partition("/")[0], kind=kind)


def _variables(code: Code) -> Iterator[tuple[str, str]]:
    """Environment variables that are read with a default."""
    for node in ast.walk(code.tree):
        if isinstance(node, ast.Call) and code.dotted(node.func) in ("os.environ.get", "os.getenv"):
            parts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if len(parts) == 2 and all(isinstance(p, str | int | float) for p in parts):
                yield str(parts[0]), str(parts[1])
