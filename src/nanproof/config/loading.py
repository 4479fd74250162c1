"""Every config of a run resolved to one view.

    load("conf/train.yaml", overrides=["optimizer.lr=5e-5"])
    load("conf", name="train_stable")                         # --config-name
    load("train.py", "configs/a.yaml", "ds.json", "run.sh")   # all that has a say, in any order

Defaults in code come first, then files in the order given, then saved training arguments, the environment and
the command line; each overrides what came before, and `Settings.history` keeps both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..errors import FormatError, NanproofError, UsageError
from . import hydra, jsonfile, pythonfile, tomlfile, yamlfile
from .code import Code
from .dialect import dialect_of
from .interpolate import resolve
from .launch import Launch, read_launch
from .meaning import concepts_of
from .overrides import Override, parse_override, unfold
from .source import Source
from .tree import Items, Leaf, Section, flatten
from .value import Layers, Origin, Settings, Value

SHELL = (".sh", ".bash", ".slurm", ".sbatch", ".zsh", ".bat", ".cmd", ".ps1")
TREES = {
    ".yaml": yamlfile.read_yaml,
    ".yml": yamlfile.read_yaml,
    ".json": jsonfile.read_json,
    ".toml": tomlfile.read_toml,
}
SUFFIXES = (*TREES, ".py", *SHELL)
_BASES = ("_BASE_", "_base_", "__base__")


def load(
    *paths: str | Path,
    overrides: Iterable[str] = (),
    name: str | None = None,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Settings:
    """Resolve configs, code and launch scripts to the settings in force.

    ``name`` chooses a config in the folder that is given first. ``arguments`` are saved training arguments that
    were read from elsewhere, as a plain mapping. A file that is not what it claims to be raises `FormatError`.
    """
    layers = Layers()
    changes = [(parse_override(o), "", 0) for o in overrides]
    files = [Path(p) for p in paths]
    launches = [(p, read_launch(Source.read(p))) for p in files if p.suffix in SHELL]
    for path, launch in launches:
        changes = [(change, str(path), line) for change, line in launch.changes] + changes
        given = {f.resolve() for f in files}
        files += [f for f in _named(path, launch) if f.resolve() not in given]
        folder = _folder(path, launch) if launch.config_name and name is None else None
        if folder and (folder / f"{launch.config_name.removesuffix('.yaml')}.yaml").resolve() not in given:
            files, name = [folder, *files], launch.config_name
    known = {k: v for _, launch in launches for k, (v, _) in launch.environment.items()} | dict(environment or {})

    for path in [p for p in files if p.suffix == ".py"]:
        code = Code.read(path)
        _put(layers, pythonfile.values(code))
        layers.codes.append(code)
    for path in [p for p in files if p.suffix != ".py" and p.suffix not in SHELL]:
        changes = _file(layers, path, name if path.is_dir() else None, changes)
    if arguments is not None:
        _put(layers, unfold("", arguments, path="training_args.bin", line=0, text="", origin="training-args"))
    for path, launch in launches:
        _environment(layers, {k: (v, str(path), line) for k, (v, line) in launch.environment.items()})
    _environment(layers, {k: (v, "", 0) for k, v in (environment or {}).items()})
    for _, launch in launches:
        _put(layers, launch.values)
    for change, where, line in changes:
        hydra.apply(layers, _full(layers, change), where, line)
    resolve(layers, known)
    return layers.settings()


def read(path: str | Path) -> list[Value]:
    """What one file says by itself."""
    file = Path(path)
    if file.suffix == ".py":
        return list(pythonfile.values(Code.read(file)))
    return parse(Source.read(file))


def parse(source: Source) -> list[Value]:
    """What a text says by itself; the ending of its path tells the format."""
    suffix = Path(source.path).suffix
    if suffix == ".py":
        return list(pythonfile.values(Code.parse(source.path, source.whole)))
    if suffix in SHELL:
        return read_launch(source).values
    return tool_values(source, tree_of(source))


def tree_of(source: Source) -> Section:
    """A YAML, JSON or TOML text as a tree; without one of their endings it is told by its contents."""
    suffix = Path(source.path).suffix.lower()
    if suffix in (".bin", ".pt", ".pth", ".safetensors", ".ckpt"):
        raise UsageError(f"{source.path} is a checkpoint, not a config", hint=f"nanproof scan {source.path}")
    guess = jsonfile.read_json if source.text.lstrip().startswith("{") else yamlfile.read_yaml
    return TREES.get(suffix, guess)(source)


def tool_values(source: Source, tree: Section) -> list[Value]:
    """The values of a file; those of accelerate and DeepSpeed go below the tool's name."""
    origins: dict[str, Origin] = {".json": "json", ".toml": "toml"}
    found = list(flatten(tree, source, origins.get(Path(source.path).suffix.lower(), "yaml")))
    dialect = dialect_of(v.key for v in found)
    if dialect in ("accelerate", "deepspeed"):
        return [replace(v, key=f"{dialect}.{v.key}", origin=dialect) for v in found]
    return found


def _put(layers: Layers, values: Iterable[Value]) -> None:
    for value in values:
        layers.put(value)


def _file(
    layers: Layers, path: Path, name: str | None, changes: list[tuple[Override, str, int]]
) -> list[tuple[Override, str, int]]:
    """Add one config file, or the named one of a folder; returns the changes that are still to be made."""
    place = (path, name) if name is not None else hydra.root_of(path) if path.suffix in (".yaml", ".yml") else None
    if path.is_dir() and name is None:
        raise UsageError(f"{path} is a folder", hint="name a config in it: --config-name NAME, or give the file")
    if place is not None:
        groups = [c for c in changes if (place[0] / c[0].key).is_dir()]
        composed = hydra.compose(place[0], place[1], [c for c, _, _ in groups])
        for value in [v for vs in composed.history.values() for v in vs if v.key in composed.values]:
            layers.put(value)
        layers.notes += composed.notes
        return [c for c in changes if c not in groups]
    source = Source.read(path)
    tree = tree_of(source)
    _put(layers, _bases(path, tree, 0))
    if isinstance(tree.get("defaults"), Items) and source.path.endswith((".yaml", ".yml")):
        layers.notes.append(f"{path}: the configs that its defaults list names were not found beside it")
        _put(layers, hydra.own_values(source, tree))
    else:
        _put(layers, tool_values(source, tree))
    return changes


def _bases(path: Path, tree: Section, depth: int) -> Iterator[Value]:
    """What a config inherits through ``_BASE_``, as detectron2 and others write it."""
    for key in _BASES:
        node = tree.get(key)
        rows = node.items if isinstance(node, Items) else [node]
        for row in rows:
            if isinstance(row, Leaf) and isinstance(row.value, str) and depth < 10:
                base = path.parent / row.value
                try:
                    source = Source.read(base)
                    below = tree_of(source)
                except NanproofError:
                    continue
                yield from _bases(base, below, depth + 1)
                yield from tool_values(source, below)


def _full(layers: Layers, change: Override) -> Override:
    """``fp16.enabled=true`` means the key of the DeepSpeed file when no other has that name."""
    if change.kind == "set" and not layers.has(change.key):
        for tool in ("accelerate", "deepspeed"):
            if layers.has(f"{tool}.{change.key}"):
                return replace(change, key=f"{tool}.{change.key}")
    return change


def _environment(layers: Layers, variables: Mapping[str, tuple[str, str, int]]) -> None:
    """``OPTIMIZER_LR=5e-5`` speaks of ``optimizer.lr``, when there is such a key."""
    from .overrides import plain

    if "ACCELERATE_MIXED_PRECISION" in variables:
        text, path, line = variables["ACCELERATE_MIXED_PRECISION"]
        key = "accelerate.mixed_precision"
        layers.put(Value(key=key, value=text, path=path, line=line, text=text, origin="environment"))
    names: dict[str, list[str]] = {}
    for key in layers.values:
        if concepts_of(key):
            parts = key.upper().replace("-", "_").split(".")
            for start in range(len(parts)):
                names.setdefault("_".join(parts[start:]), []).append(key)
    for name, (text, path, line) in variables.items():
        if len(keys := names.get(name, [])) == 1:
            value = Value(key=keys[0], value=plain(text), path=path, line=line, text=text, origin="environment")
            layers.put(value)


def _named(script: Path, launch: Launch) -> list[Path]:
    """The config files that a launch script names, as far as they are there."""
    places = [script.parent, *list(script.resolve().parents)[1:3]]
    found = [next((p / c for p in places if (p / c).is_file()), None) for c in launch.configs]
    return [f for f in found if f is not None]


def _folder(script: Path, launch: Launch) -> Path | None:
    """Where Hydra would look for the named config."""
    places = [script.parent, *list(script.resolve().parents)[1:3]]
    beside = [p / Path(s).parent for p in places for s in launch.scripts] + places
    names = [launch.config_path] if launch.config_path else ["conf", "config", "configs", "."]
    for folder in (p / n for p in beside for n in names):
        if (folder / f"{launch.config_name.removesuffix('.yaml')}.yaml").is_file():
            return folder
    return None


def load_quietly(*paths: str | Path) -> Settings:
    """Like `load`, for files that are met by the way: one that cannot be read becomes a note."""
    try:
        return load(*paths)
    except (FormatError, UsageError) as error:
        return Settings(notes=(error.message,))
