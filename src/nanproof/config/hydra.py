"""Hydra's defaults lists: which files make up a config, in which order, and below which section each goes.

    conf/train.yaml        defaults: [_self_, {optimizer: adam}, {override /model: large}]
    conf/optimizer/adam.yaml

`compose` follows Hydra's rules (order, ``_self_``, packages, ``override``, ``optional``, nested lists,
interpolated choices) on files only: nothing is imported and no plugin is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import FormatError, NanproofError
from ..files import open_file
from .overrides import Override
from .source import Source
from .tree import Items, Leaf, Section, flatten
from .value import Layers, Value, rebase
from .yamlfile import read_yaml

_HEADER = re.compile(r"^#\s*@package\s+(\S+)\s*$", re.M)
_ITEM = re.compile(r"(?:(optional|override)\s+)?(?:(optional|override)\s+)?([^@\s]+)(?:@(\S+))?")
_SIGN = re.compile(rb"^defaults:[ \t]*(#.*)?\r?\n\s*- |^#\s*@package\s", re.M)
_MAX_FILES = 500


@dataclass(slots=True)
class Default:
    """One line of a defaults list, before it is known where it leads."""

    group: str | None
    """None when the line names a config and not a choice in a group."""
    choice: str | list[str] | None
    package: str | None = None
    override: bool = False
    optional: bool = False
    base: str = ""
    """The folder that relative names start from."""
    parent: str = ""
    """The section of the config that holds the line."""
    header: str | None = None

    @property
    def group_path(self) -> str:
        if self.group is not None:
            named = self.group
        else:
            named = str(self.choice).rpartition("/")[0]
            if str(self.choice).startswith("/") and not named:
                return ""
        if named.startswith("/"):
            return named[1:]
        return "/".join(p for p in (self.base, named) if p)

    @property
    def path(self) -> str:
        if self.group is not None:
            return f"{self.group_path}/{self.choice}"
        return "/".join(p for p in (self.group_path, str(self.choice).rpartition("/")[2]) if p)

    def section(self, with_header: bool = True) -> str:
        """The section below which the file's values go."""
        package = self.package if self.package is not None else self.header if with_header else None
        if package == "_here_":
            package = ""
        if package is None:
            named = self.group if self.group is not None else str(self.choice).lstrip("/").rpartition("/")[0]
            package = named.removeprefix("/").replace("/", ".")
        package = package.replace("_group_", f"_global_.{self.group_path.replace('/', '.')}")
        whole = ".".join(p for p in (self.parent, package) if p)
        return whole.rpartition("_global_")[2].removeprefix(".") if "_global_" in whole else whole

    @property
    def override_key(self) -> str:
        default, final = self.group_path.replace("/", "."), self.section(with_header=False)
        return self.group_path if default == final else f"{self.group_path}@{final or '_global_'}"


@dataclass(slots=True)
class _File:
    source: Source
    tree: Section
    package: str | None
    defaults: list[Default | Literal["_self_"]]


@dataclass
class _Composer:
    folder: Path
    choices: dict[str, str | list[str] | None] = field(default_factory=dict)
    appended: list[Default] = field(default_factory=list)
    deleted: set[str] = field(default_factory=set)
    known: dict[str, str | list[str] | None] = field(default_factory=dict)
    files: dict[str, _File | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def load(self, name: str) -> _File | None:
        if name not in self.files:
            if len(self.files) > _MAX_FILES:
                raise FormatError(f"{self.folder} includes more than {_MAX_FILES} files", hint="give the config itself")
            self.files[name] = self._read(name)
        return self.files[name]

    def _read(self, name: str) -> _File | None:
        for ending in ("", ".yaml", ".yml"):
            path = self.folder / f"{name}{ending}"
            if (ending or name.endswith((".yaml", ".yml"))) and ".." not in Path(name).parts and path.is_file():
                source = Source.read(path)
                if not source.text.strip():
                    return _File(source, Section(start=0, end=0), None, [])
                tree = read_yaml(source)
                header = _HEADER.search(source.text.partition("\ndefaults")[0])
                package = header[1] if header else None
                if package is not None and package != "_group_" and not package.startswith("_global_"):
                    package = f"_global_.{package}"
                return _File(source, tree, package, list(defaults_of(tree)))
        return None

    def expand(self, default: Default, *, root: bool = False, depth: int = 0) -> list[tuple[str, str]]:
        """Files and their sections, in the order in which they are merged."""
        if depth > 30:
            raise FormatError(f"{default.path} includes itself", hint="look at its defaults list")
        if default.group is not None and default.override_key in self.deleted:
            return []
        self.known.setdefault(default.override_key, default.choice)
        if default.choice is None or str(default.choice).endswith("???"):
            return []
        file = self.load(default.path)
        if file is None:
            if not default.optional and not default.group_path.startswith("hydra"):
                self.notes.append(f"{self.folder}: there is no {default.path}.yaml, which a defaults list names")
            return []
        default.header = file.package
        here, section = default.group_path, default.section()
        lines = list(file.defaults) + (list(self.appended) if root else [])
        if not lines:
            return [(default.path, section)]
        if "_self_" not in lines and any(isinstance(d, Default) and not d.override for d in lines):
            at = len(file.defaults)
            lines.insert(at, "_self_")
        elif "_self_" not in lines:
            lines.append("_self_")
        for line in lines:
            if isinstance(line, Default):
                line.base, line.parent = here, section
                if line.override:
                    self.choices.setdefault(line.override_key, line.choice)
        return self._merge(default, section, lines, depth)

    def _merge(
        self, default: Default, section: str, lines: list[Default | Literal["_self_"]], depth: int
    ) -> list[tuple[str, str]]:
        made: dict[int, list[tuple[str, str]]] = {}
        open_lines = [i for i, d in enumerate(lines) if not (isinstance(d, Default) and d.override)]
        # later lines first, so that their overrides are known to the ones before; interpolated choices last of all
        late = [i for i in open_lines if isinstance(lines[i], Default) and "${" in str(lines[i].choice)]  # type: ignore[union-attr]
        for index in [*reversed([i for i in open_lines if i not in late]), *late]:
            line = lines[index]
            if not isinstance(line, Default):
                made[index] = [(default.path, section)]
                continue
            if line.group is not None and line.override_key in self.choices:
                line.choice = self.choices[line.override_key]
            if index in late:
                line.choice = self._choice(str(line.choice))
            made[index] = []
            for one in _each(line):
                made[index] += self.expand(one, depth=depth + 1)
        return [pair for index in open_lines for pair in made[index]]

    def _choice(self, text: str) -> str:
        def known(found: re.Match[str]) -> str:
            return str(self.known.get(found[1].strip(), "???"))

        return re.sub(r"\$\{([^}]*)\}", known, text)


def _each(line: Default) -> Iterator[Default]:
    """A line for each option, where several are chosen."""
    if not isinstance(line.choice, list):
        yield line
        return
    for option in line.choice:
        yield Default(
            group=None,
            choice=f"{line.group}/{option}",
            package=line.package,
            optional=line.optional,
            base=line.base,
            parent=line.parent,
        )


def defaults_of(tree: Section) -> Iterator[Default | Literal["_self_"]]:
    """The lines of a config's defaults list."""
    rows = tree.get("defaults")
    for row in rows.items if isinstance(rows, Items) else ():
        if isinstance(row, Leaf) and row.value == "_self_":
            yield "_self_"
        elif isinstance(row, Leaf) and isinstance(row.value, str):
            if found := _ITEM.fullmatch(row.value.strip()):
                words = {found[1], found[2]}
                yield Default(None, found[3], found[4], "override" in words, "optional" in words)
        elif isinstance(row, Section):
            for key, node in row.pairs:
                if found := _ITEM.fullmatch(key.strip()):
                    words = {found[1], found[2]}
                    if isinstance(node, Items):
                        chosen: str | list[str] | None = [str(i.value) for i in node.items if isinstance(i, Leaf)]
                    else:
                        value = node.value if isinstance(node, Leaf) else None
                        chosen = str(value) if value is not None else None
                    yield Default(found[3], chosen, found[4], "override" in words, "optional" in words)


def compose(folder: Path, name: str, overrides: Iterable[Override]) -> Layers:
    """The config that ``--config-name name`` and the overrides give, from the files of a folder."""
    composer = _Composer(folder)
    plain: list[Override] = []
    for change in overrides:
        group = (folder / change.key).is_dir() and ".." not in change.key
        chosen: str | list[str] | None = change.value if isinstance(change.value, str) else None
        if isinstance(change.value, tuple):
            chosen = [str(v) for v in change.value]
        key = f"{change.key}@{change.package}" if change.package else change.key
        if not group or isinstance(change.value, dict):
            plain.append(change)
        elif change.kind == "delete":
            composer.deleted.add(key)
        elif change.kind == "add":
            composer.appended.append(Default(change.key, chosen, change.package or None))
        else:
            composer.choices[key] = chosen
    root = Default(None, name.removesuffix(".yaml").removesuffix(".yml"))
    if composer.load(root.path) is None:
        raise FormatError(f"{folder} holds no config {name}", hint="name a file of the folder, without .yaml")
    layers = Layers()
    for path, section in composer.expand(root, root=True):
        file = composer.load(path)
        assert file is not None
        for value in rebase(own_values(file.source, file.tree), section):
            layers.put(value)
    layers.notes += composer.notes
    for change in plain:
        apply(layers, change)
    return layers


def own_values(source: Source, tree: Section) -> Iterator[Value]:
    """What a config says itself, without its defaults list."""
    kept = Section(pairs=[p for p in tree.pairs if p[0] != "defaults"], start=tree.start, end=tree.end)
    return flatten(kept, source, "yaml")


def apply(layers: Layers, change: Override, path: str = "", line: int = 0) -> None:
    """Carry out one change from the command line."""
    if change.kind == "delete":
        layers.drop(change.key)
        return
    if change.kind == "set" and layers.values and not layers.has(change.key):
        layers.notes.append(f"{change.text}: the config has no {change.key}; Hydra wants +{change.text}")
    for value in change.values(path, line):
        layers.put(value)


def is_hydra(path: Path) -> bool:
    """Whether a file has a defaults list or a package header, cheaply told."""
    try:
        with open_file(path) as file:
            return _SIGN.search(file.read(4096)) is not None
    except OSError:
        return False


def root_of(path: Path) -> tuple[Path, str] | None:
    """The folder that a config's defaults list counts from, and the config's name there; None if it has no list."""
    try:
        lines = [d for d in defaults_of(read_yaml(Source.read(path))) if isinstance(d, Default) and not d.override]
    except NanproofError:
        return None
    if not lines:
        return None
    folder = path.parent
    for _ in range(4):
        for line in lines:
            line.base = str(path.parent.relative_to(folder)).replace(".", "").strip("/")
        named = [d for line in lines for d in _each(line) if d.choice and "${" not in str(d.choice)]
        if any((folder / f"{d.path}.yaml").is_file() or (folder / f"{d.path}.yml").is_file() for d in named):
            return folder, str(path.relative_to(folder).with_suffix(""))
        folder = folder.parent
    return None
