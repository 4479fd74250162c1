"""The commands that a diagnosis prints: complete, with real paths, and tried out before they are printed.

>>> commands = Commands(None)
>>> commands.for_cause("masked-row", ())
('nanproof explain masked-row',)

A command is only given when it does something here: lint where the rule fires, harden where a setting changes, scan of
a checkpoint that exists, run of a script that can start. ``nanproof explain`` is what remains.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.hardening import harden
from ..config.project import Project, root_of
from ..errors import NanproofError
from ..files import file_text
from ..linting import lint
from .evidence import Fact
from .sources.part import name_in
from .sources.typed import scripts

if TYPE_CHECKING:
    from .run import Run

HARDENED = (
    "fp16-overflow",
    "double-fp16",
    "lr-too-high",
    "warmup",
    "loss-scale-collapse",
    "optimizer-eps-beta",
    "logger-masks-nan",
    "amp-misuse",
    "arch-instability",
    "distributed-desync",
)
"""Causes that a change of the config can repair."""
FROM_DATA = ("bad-data", "empty-target-mean", "label-out-of-range", "ctc-infeasible", "data-distribution-spike")
FROM_CHECKPOINTS = (
    "corrupted-checkpoint",
    "scheduler-state-on-resume",
    "uninitialised-params",
    "loss-scale-collapse",
    "data-distribution-spike",
)
MOST = 3


class Commands:
    """Builds commands for one run, relative to the current directory."""

    def __init__(
        self,
        run: Run | None,
        paths: Iterable[str | os.PathLike[str]] = (),
        *,
        stated: Mapping[str, object] | None = None,
        described: str | os.PathLike[str] | None = None,
    ) -> None:
        self._run = run
        self._projects: dict[Path, Project] = {}
        self._given = [_path(p) for p in paths]
        self._given += [f"--evidence {_path(described)}"] if described is not None else []
        self._given += [f"--fact {shlex.quote(f'{name}={value}')}" for name, value in (stated or {}).items()]

    def for_cause(self, name: str, facts: Iterable[Fact]) -> tuple[str, ...]:
        """What repairs this cause, or shows it more closely; never empty."""
        found = dict.fromkeys([*self._specific(name, list(facts)), f"nanproof explain {name}"])
        return tuple(found)[:MOST]

    def guard(self) -> str:
        """``nanproof run`` with the command line that started the run, if that can be started here."""
        if self._run is None:
            return ""
        for script, arguments in self._launches():
            if _can_start(script, arguments):
                ranks = ["--nproc", "1"] if "init_process_group" in file_text(script) else []
                return shlex.join(["nanproof", "run", *ranks, _path(script), *arguments])
        return ""

    def ask(self, fact: str, answers: Iterable[str]) -> tuple[str, ...]:
        """What answers a question: the guarded run, which finds out by itself, or the user, with one of these."""
        was_guarded = self._run is not None and bool(self._run.places.incidents)  # it has said what it knows
        if not was_guarded and (guarded := self.guard()):
            return (guarded,)
        return tuple(" ".join(["nanproof diagnose", *self._given, f"--fact {fact}={a}"]) for a in answers)

    def _specific(self, name: str, facts: list[Fact]) -> Iterator[str]:
        run = self._run
        if run is None:
            return
        if any(f.where.startswith("incident ") for f in facts):
            located = {f.where for f in run.part.facts if f.name == "located-op"}
            folders = (i.parent for i in run.places.incidents)
            shown = (f for f in folders if f"incident {name_in(run.places.root, f)}" in located)
            yield from (f"nanproof locate {_path(folder)}" for folder in islice(shown, 1))
        yield from self._lint(facts)
        if name in FROM_DATA:
            names = [str(f.value) for f in run.part.facts if f.name == "data-file"]
            for file in run.places.data:
                if any(str(file).endswith(n) for n in names):
                    yield f"nanproof diagnose --data {_path(file)}"
                    break
        if name in HARDENED:
            yield from self._harden(name)
        if name in FROM_CHECKPOINTS and run.reports:
            bad = next((r for r in run.reports if not r.ok), run.reports[-1])
            yield f"nanproof scan {_path(bad.path)}"

    def _lint(self, facts: list[Fact]) -> Iterator[str]:
        assert self._run is not None
        by_file: dict[str, list[str]] = {}
        for fact in facts:
            if fact.name == "lint":
                by_file.setdefault(fact.where.rpartition(":")[0], []).append(str(fact.value))
        for file, codes in list(by_file.items())[:1]:
            path = next((p for p in (Path(file), self._run.places.root / file) if p.is_file()), None)
            if path is not None:
                chosen = sorted(set(codes))
                info = "" if lint([path], select=chosen) else " --info"  # all of them are unconfirmed
                yield f"nanproof lint {_path(path)} --select {','.join(chosen)}{info}"

    def _harden(self, cause: str) -> Iterator[str]:
        assert self._run is not None
        card = self._run.in_force.get("gpu")
        gpu = str(card.value) if card is not None else ""
        tried = [c.path for c in self._run.configs if c.kind != "shell"] + [
            c.path for c in self._run.configs if c.kind == "shell"
        ]
        for path in dict.fromkeys([*tried, *self._run.places.code[:20]]):
            for facts in ([{"cause": cause, "gpu": gpu}] if gpu else []) + [{"cause": cause}]:
                try:
                    changed = bool(harden(path, facts=facts, project=self._around(path)).changes)
                except (NanproofError, OSError, ValueError):
                    continue
                if changed:
                    words = [f"--fact {shlex.quote(f'{k}={v}')}" for k, v in facts.items()]
                    yield " ".join(["nanproof harden", _path(path), *words])
                    return

    def _around(self, config: str | Path) -> Project:
        """The project of a config, read once for all that are tried."""
        root = root_of(Path(config))
        if root not in self._projects:
            assert self._run is not None
            self._projects[root] = Project.around(Path(config), self._run.project.codes)
        return self._projects[root]

    def _launches(self) -> Iterator[tuple[Path, list[str]]]:
        """Scripts with the arguments that they were started with, then training scripts without any."""
        assert self._run is not None
        places = self._run.places
        for script, arguments in scripts(places):
            if not any(c in word for word in arguments for c in "$`"):
                yield script, arguments
        for script in sorted(places.code, key=lambda p: (len(p.parts), not p.name.startswith("train"), p.name)):
            if script.stem.startswith(("train", "main", "finetune", "pretrain", "run")):
                yield script, []


def _path(path: str | os.PathLike[str]) -> str:
    """A path as one would type it here."""
    shown = os.path.relpath(path)
    far = Path(shown).parts[:4] == (os.pardir,) * 4
    return shlex.quote(str(Path(path).absolute()) if far else shown)


def _can_start(script: Path, arguments: list[str]) -> bool:
    """Whether a script has what it needs: it trains, its names are defined, its modules are installed."""
    try:
        text = file_text(script)
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    if not (".backward(" in text or ".train()" in text or ".fit(" in text or ".learn(" in text):
        return False
    if "required=True" in text.replace(" ", "") and not arguments:
        return False
    flags = {a.partition("=")[0] for a in arguments if a.startswith("--")}
    if "ArgumentParser(" in text and ".parse_args(" in text and not all(f in text for f in flags):
        return False
    defined, used, star = _names(tree)
    if not star and used - defined - set(dir(builtins)) - {"__file__", "__name__", "__doc__"}:
        return False
    files = [*_files(tree), *(Path(a) for a in arguments if Path(a).suffix in _FILES)]
    return all(f.exists() for f in files) and all(_importable(module, script.parent) for module in _modules(tree))


_FILES = frozenset(
    {
        ".csv",
        ".tsv",
        ".npy",
        ".npz",
        ".json",
        ".jsonl",
        ".pt",
        ".pth",
        ".ckpt",
        ".pkl",
        ".yaml",
        ".yml",
        ".txt",
        ".parquet",
        ".h5",
        ".toml",
        ".bin",
        ".safetensors",
    }
)


def _files(tree: ast.AST) -> Iterator[Path]:
    """The files that a script reads by a name written in it, from the current directory."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name, callee = node.args[0].value, ast.unparse(node.func).rpartition(".")[2]
            writes = callee == "open" and len(node.args) > 1 and "r" not in ast.unparse(node.args[1])
            reads = callee in ("open", "load", "loadtxt", "genfromtxt", "fromfile", "memmap") or "read" in callee
            if reads and not writes and isinstance(name, str) and Path(name).suffix in _FILES:
                yield Path(name)


def _names(tree: ast.AST) -> tuple[set[str], set[str], bool]:
    defined: set[str] = set()
    used: set[str] = set()
    star = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            star = star or any(a.name == "*" for a in node.names)
            defined |= {(a.asname or a.name).partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return defined, used, star


def _modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _importable(module: str, folder: Path) -> bool:
    if (folder / module).is_dir() or (folder / f"{module}.py").is_file():
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False
