"""Who may import whom, what stays light, and who may write to disk."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "nanproof"
MODULES = sorted(SRC.rglob("*.py"))
BASE = {
    "records",
    "errors",
    "floats",
    "files",
    "text",
    "schema",
    "topics",
    "journal",
    "collector",
    "tensors",
    "rng",
    "captured",
    "losses",
    "location",
    "jsonform",
    "cards",
    "launch",
    "plugins",
    "forecast",
}

# room: the other rooms that it may import (the base is open to all; cli may import everything)
ARROWS: dict[str, set[str]] = {
    "ops": set(),
    "islands": set(),
    "testing": set(),
    "guard": {"locating", "checkpoint", "islands"},
    "locating": set(),
    "checkpoint": set(),
    "logs": set(),
    "config": set(),
    "linting": {"config"},
    "diagnosing": {"checkpoint", "logs", "config", "linting"},
    "run": {"guard", "locating", "integrations", "logs"},
    "integrations": {"guard", "locating", "run"},  # run: frameworks that call a function in processes of their own
    "watch": {"logs", "diagnosing", "config"},
    "report": {"logs", "diagnosing", "watch", "config"},
    "cases": {"guard", "ops"},
    "cure": {"config", "linting", "watch", "report"},
}
LIGHT = {"checkpoint", "logs", "config", "linting", "diagnosing", "watch", "report", "cure", "cli"}
WITHOUT_TORCH = LIGHT | BASE - {"tensors", "rng", "captured", "losses"}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's syntax, parsed once for all tests."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Every module that a file imports, absolute, and the statement."""
    package = ["nanproof", *path.relative_to(SRC).with_suffix("").parts]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield node.module or "", node
                continue
            base = package[: len(package) - node.level]
            if node.module:
                yield ".".join([*base, node.module]), node
            else:
                for name in node.names:
                    yield ".".join([*base, name.name]), node


def room(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


def test_the_arrows_between_rooms() -> None:
    wrong = []
    for path in MODULES:
        here = room(path)
        if here in ("cli", "__init__", "__main__"):
            continue
        allowed = BASE | {here} | ARROWS.get(here, set()) if here not in BASE else BASE
        for name, node in imports(path):
            parts = name.split(".")
            if parts[0] == "nanproof" and len(parts) > 1 and parts[1] not in allowed | {"__version__"}:
                wrong.append(f"{path.relative_to(SRC)}:{node.lineno} imports {name}")
    assert wrong == []


def test_every_room_has_its_arrows_written_down() -> None:
    rooms = {room(p) for p in MODULES} - {"__init__", "__main__", "cli"}
    assert rooms <= BASE | set(ARROWS)


def test_torch_free_rooms_do_not_import_torch() -> None:
    exempt = SRC / "checkpoint" / "ranks.py"  # inside a function, when torchrun started the scan
    wrong = [
        f"{path.relative_to(SRC)}:{node.lineno}"
        for path in MODULES
        if room(path) in WITHOUT_TORCH and path != exempt
        for name, node in imports(path)
        if name.split(".")[0] in ("torch", "transformers", "lightning", "accelerate")
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "code",
    [
        "import nanproof; dir(nanproof)",
        "import nanproof.testing.plugin",
        "from nanproof import Finding, Incident, Verdict, NanproofError",
        *(
            f"import sys; sys.argv = ['nanproof', {', '.join(map(repr, args))}]\n"
            "try: from nanproof.cli import main; main()\nexcept SystemExit as e: assert e.code == 0"
            for args in (
                ["--help"],
                ["--version"],
                ["case"],
                *([v, "--help"] for v in ("diagnose", "explain", "lint", "scan")),
            )
        ),
    ],
)
def test_light_paths_do_not_load_torch(code: str) -> None:
    heavy = "{'torch', 'transformers', 'lightning', 'pandas', 'matplotlib'}"
    check = f"\nimport sys; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code + check], check=True, timeout=600, stdout=subprocess.DEVNULL)


WRITERS = {
    "write_text",
    "write_bytes",
    "mkdir",
    "makedirs",
    "unlink",
    "rename",
    "replace_file",
    "rmtree",
    "rmdir",
    "touch",
    "symlink_to",
    "save_file",
    "savez",
    "tofile",
    "copyfile",
    "copytree",
    "copy2",
    "truncate",
    "ftruncate",
    "mkstemp",
    "mkdtemp",
    "NamedTemporaryFile",
    "TemporaryDirectory",
    "O_WRONLY",
    "O_RDWR",
    "O_CREAT",
    "O_TRUNC",
}


def writes(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and node.attr in WRITERS:
            yield f"{path.relative_to(SRC)}:{node.lineno} .{node.attr}"
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "open":
            words = [a for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
            if any(isinstance(w.value, str) and set(w.value) & set("wax+") and len(w.value) <= 3 for w in words):
                yield f"{path.relative_to(SRC)}:{node.lineno} open for writing"


def test_only_files_py_writes() -> None:
    found = [w for path in MODULES if path != SRC / "files.py" for w in writes(path)]
    assert found == []


def test_the_check_on_writers_can_fail() -> None:
    assert len(list(writes(SRC / "files.py"))) > 10


# Readers that do not open what a project holds: the package's own files, /proc, what a case itself has written, and
# the sources of `checkpoint`, which check for regular files themselves.
OWN_READERS = {"checkpoint", "cases", "islands", "files"}
OWN_WORDS = ("__file__", "/proc/", "fdinfo", "resources.files")


def reads(path: Path) -> Iterator[str]:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = ast.unparse(node.func.value)
            rb = node.func.attr == "open" and any(isinstance(a, ast.Constant) for a in node.args)
            if (rb or node.func.attr in ("read_text", "read_bytes")) and not any(word in of for word in OWN_WORDS):
                yield f"{path.relative_to(SRC)}:{node.lineno} {of}.{node.func.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "open" and "devnull" not in ast.unparse(node):
            yield f"{path.relative_to(SRC)}:{node.lineno} open"


def test_only_files_py_opens_what_others_wrote() -> None:
    """It opens regular files only: a named pipe in a project must not hold a command up."""
    assert [r for path in MODULES if room(path) not in OWN_READERS for r in reads(path)] == []


def test_the_check_on_readers_can_fail() -> None:
    assert len([r for path in MODULES if room(path) == "cases" for r in reads(path)]) > 2
