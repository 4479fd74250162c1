"""Finding checkpoints: which files and folders are one, what belongs to it, and in which order they were written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from .flaws import Flaw
from .formats import BESIDE, EXTENSIONS, HOLDERS
from .store import Item, Local, Store, resolve

MAX_FILES = 100_000
MAX_DEPTH = 8
JOURNAL = "quarantine.jsonl"

# A folder with one of these is a checkpoint as a whole.
_MARKS = re.compile(
    r"\.metadata|.*\.index\.json|trainer_state\.json|model(-\d+-of-\d+)?\.safetensors|"
    r"pytorch_model(-\d+-of-\d+)?\.bin|adapter_model\.(bin|safetensors)|diffusion_pytorch_model.*|"
    r"(optimizer|scheduler)(_\d+)?\.(pt|bin)|.*_(model|optim)_states\.pt|random_states_\d+\.pkl|.*\.distcp"
)
# Beside the tensors of a folder lie files that are not tensors; they are not held against it.
_NOT_TENSORS = ("tokenizer", "spiece", "vocab", "merges")
_STEP_FOLDER = re.compile(r"(?i).*(checkpoint|step|epoch|iter|ckpt)[-_=]?\d+.*")
_NUMBERS = re.compile(r"\d+")
_STEP = re.compile(r"(?i)(?:step|iter|iteration|checkpoint|ckpt|epoch)s?[-_=]?(\d+)")


class Checkpoint(NamedTuple):
    """One checkpoint as found: a file, or a folder with the files that belong to it."""

    name: str
    path: str
    store: Store
    items: tuple[Item, ...]
    """Its files; their names are relative to the checkpoint."""
    flaw: Flaw | None = None

    @property
    def step(self) -> int | None:
        """The step as the name tells it."""
        found = _STEP.findall(self.name.rpartition("/")[2])
        if found:
            return int(found[-1][:18])
        numbers = _NUMBERS.findall(self.name.rpartition("/")[2].rpartition(".")[0] or self.name)
        return int(numbers[-1][:18]) if numbers else None

    @property
    def family(self) -> tuple[str, str]:
        """What checkpoints of the same series share: the folder and the name without its numbers."""
        folder, _, last = self.path.rpartition("/")
        return folder, _NUMBERS.sub("#", last)


def discover(paths: list[str | os.PathLike[str]]) -> list[Checkpoint]:
    """All checkpoints under some paths, in the order of training within each series."""
    found: list[Checkpoint] = []
    places = [place for path in paths for place in resolve(path)]
    for store, path in places:
        path = path.rstrip("/") or "/"
        if store.kind(path) == "folder":
            found += list(_folder(store, path, _last(path)))
        elif path.endswith(".index.json"):
            found.append(_indexed(store, path))
        else:
            found.append(_file(store, path, _last(path)))
    unique = {c.path: c for c in found}
    return sorted(unique.values(), key=_order)


def _order(checkpoint: Checkpoint) -> tuple[object, ...]:
    step = checkpoint.step
    return (*checkpoint.family, step is None, step or 0, checkpoint.name)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def _file(store: Store, path: str, name: str) -> Checkpoint:
    return Checkpoint(name=name, path=path, store=store, items=(Item(name=_last(path), path=path, folder=False),))


def _indexed(store: Store, path: str) -> Checkpoint:
    """The folder of a shard index, given by the index itself."""
    folder = path.rpartition("/")[0] or "."
    return _whole(store, folder, _last(path), store.list(folder))


def _folder(store: Store, path: str, name: str, depth: int = 0) -> Iterator[Checkpoint]:
    try:
        items = store.list(path)
    except Flaw as flaw:
        yield Checkpoint(name=name, path=path, store=store, items=(), flaw=flaw)
        return
    names = {i.name for i in items}
    if JOURNAL in names and depth:
        return  # a quarantine inside of what is scanned
    prefix = f"{name}/" if depth else ""
    marked = any(_MARKS.fullmatch(i.name) for i in items if not i.folder)
    series = [i for i in items if i.folder and _STEP_FOLDER.fullmatch(i.name) and "trainer_state.json" not in names]
    if marked:
        own = [i for i in items if i not in series]
        yield _whole(store, path, name, own)
        items = series
    count = 0
    for item in items:
        if item.folder and depth < MAX_DEPTH and not item.name.startswith("."):
            for inner in _folder(store, item.path, f"{prefix}{item.name}", depth + 1):
                count += 1
                yield inner
        elif item.folder or item.name.startswith("."):
            continue
        elif item.name.lower().endswith(EXTENSIONS) or is_part(store, item):
            count += 1
            yield _file(store, item.path, f"{prefix}{item.name}")
    if not marked and not count and (not depth or path.lower().endswith(EXTENSIONS)):
        nothing = Flaw("unreadable", "is a folder without any checkpoint in it")
        yield Checkpoint(name=name, path=path, store=store, items=(), flaw=nothing)


def is_part(store: Store, item: Item) -> bool:
    """Whether a file in a folder is looked at: one that is no checkpoint only if loading it would be dangerous."""
    name = item.name.rpartition("/")[2].lower()
    if name.endswith(EXTENSIONS) and not name.startswith(_NOT_TENSORS):
        return True
    named = name.endswith((*EXTENSIONS, *BESIDE))
    if not named and not isinstance(store, Local):  # a look at each would be a round trip
        return False
    from .hidden import holds_danger

    return holds_danger(store, item.path, begins=None if named else HOLDERS)


def _whole(store: Store, path: str, name: str, items: list[Item]) -> Checkpoint:
    """A folder as one checkpoint, with all files below it that can belong to one."""
    gathered: list[Item] = []
    stack = [("", item, 0) for item in items]
    try:
        while stack:
            prefix, item, depth = stack.pop()
            if item.folder and depth < MAX_DEPTH:
                stack += [(f"{prefix}{item.name}/", inner, depth + 1) for inner in store.list(item.path)]
            elif not item.folder:
                gathered.append(Item(name=f"{prefix}{item.name}", path=item.path, folder=False, size=item.size))
            if len(gathered) > MAX_FILES:
                raise Flaw("refused", f"has more than {MAX_FILES:,} files")
    except Flaw as flaw:
        return Checkpoint(name=name, path=path, store=store, items=(), flaw=flaw)
    gathered.sort(key=lambda i: i.name)
    return Checkpoint(name=name, path=path, store=store, items=tuple(gathered))
