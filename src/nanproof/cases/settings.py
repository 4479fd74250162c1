"""Named configs, the environment, and dotted overrides, in this order: the later one wins.

    cfg = load(folder, "stable", ["optimizer.lr=5e-3"], os.environ)
    cfg.optimizer.lr

A config may build on another with a defaults list, as in Hydra. Numbers such as ``1e-4``, which YAML 1.1 takes for
text, are numbers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import UsageError

# what the users of these systems set in the shell, and what it means
ENVIRONMENT = {
    "NNODES": "launch.nnodes",
    "NPROC_PER_NODE": "launch.nproc_per_node",
    "OPTIMIZER_LR": "optimizer.lr",
    "GRAD_CLIP_NORM": "training.grad_clip_norm",
}

Tree = dict[str, Any]


class Settings:
    """A section of a config, read by attribute.

    >>> cfg = Settings({"optimizer": {"lr": 0.1}})
    >>> cfg.optimizer.lr
    0.1
    >>> cfg.optimizer.momentum
    Traceback (most recent call last):
    nanproof.errors.UsageError: the config has no momentum. Next: its keys are lr
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._tree:
            raise UsageError(f"the config has no {name}", hint=f"its keys are {', '.join(self._tree)}")
        value = self._tree[name]
        return Settings(value) if isinstance(value, dict) else value

    @property
    def tree(self) -> Tree:
        """The section as plain dictionaries."""
        return self._tree


class _Loader(yaml.SafeLoader):
    """YAML whose floats are those of everybody else: 1e-4 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_value(text: str) -> Any:
    """What a word on the command line means.

    >>> read_value("5e-5"), read_value("true"), read_value("[a, b]"), read_value("l2t")
    (5e-05, True, ['a', 'b'], 'l2t')
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise UsageError(f"{text!r} is not a value", hint="quote it, as in 'model.name=\"a: b\"'") from None


def config_names(folder: Path) -> list[str]:
    """The named configs of a case."""
    return sorted(p.stem for p in folder.glob("*.yaml"))


def load(folder: Path, name: str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of a named config, with what the environment and the command line say about them."""
    tree = _compose(folder, name, ())
    for variable, key in ENVIRONMENT.items():
        if environ is not None and environ.get(variable):
            _assign(tree, key, read_value(environ[variable]), f"the environment variable {variable}")
    for word in overrides:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise UsageError(f"{word!r} is not an override", hint="write key=value, for example optimizer.lr=5e-5")
        _assign(tree, key, read_value(text), word)
    return Settings(tree)


def _compose(folder: Path, name: str, above: tuple[str, ...]) -> Tree:
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise UsageError(f"unknown config {name!r}", hint=f"choose one of {', '.join(config_names(folder))}")
    own: Tree = yaml.load(path.read_text(), _Loader)
    composed: Tree = {}
    for base in own.pop("defaults", []):
        if base != "_self_":
            if base in above:
                raise UsageError(f"the config {base!r} builds on itself", hint=f"correct defaults: in {path.name}")
            _merge(composed, _compose(folder, base, (*above, name)))
    _merge(composed, own)
    return composed


def _merge(into: Tree, tree: Tree) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _assign(tree: Tree, key: str, value: Any, said: str) -> None:
    """Change one value; a key that is not there, or a value of another kind, is a mistake of the one who typed it."""
    known = dict(_leaves(tree, ""))
    if key not in known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"keys are {', '.join(known)}"
        raise UsageError(f"{said}: the config has no {key}", hint=hint)
    before = known[key]
    if isinstance(before, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if before is not None and type(value) is not type(before):
        raise UsageError(f"{said}: {key} is {type(before).__name__}", hint=f"give a value such as {before}")
    *sections, last = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[last] = value


def _leaves(tree: Tree, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
