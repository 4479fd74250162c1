"""A script, a module or standard input as the main program, as the interpreter itself would run it."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from ..errors import UsageError
from ..files import file_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run, and with which arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """What it is called in the name of a run's folder."""
        if self.target == "-":
            return "stdin"
        return self.target.rpartition(".")[2] if self.is_module else Path(self.target).resolve().stem

    def check(self) -> None:
        """Raise `UsageError` when there is nothing to run; nothing of it is executed."""
        if self.is_module:
            top = self.target.partition(".")[0]
            if not top or _find_top(top) is None:
                raise UsageError(
                    f"there is no module {self.target!r}", hint="run it from the folder that holds it, or install it"
                )
            return
        if self.target == "-":
            return
        path = Path(self.target)
        if path.is_dir():
            if not (path / "__main__.py").is_file():
                raise UsageError(f"{path} is a folder without __main__.py", hint="give the script in it")
        elif not path.is_file():
            raise UsageError(f"there is no script {path}", hint=_suggest(path))

    def prepare(self) -> Callable[[], None]:
        """Make it ``__main__``, and return what executes it; whatever it raises then comes out."""
        main = ModuleType("__main__")
        main.__dict__.update(__builtins__=__builtins__, __annotations__={}, __package__=None, __cached__=None)
        if self.is_module:
            sys.path[0] = str(Path.cwd())
            sys.modules["__main__"] = main
            code = self._load_module(main)
        else:
            code = self._load_script(main)
            sys.modules["__main__"] = main
        return functools.partial(exec, code, main.__dict__)

    def _load_script(self, main: ModuleType) -> CodeType:
        if self.target == "-":
            sys.argv = ["-", *self.arguments]
            sys.path[0] = ""
            return compile(sys.stdin.read(), "<stdin>", "exec")
        path = Path(self.target)
        folder, file = (path, path / "__main__.py") if path.is_dir() else (path.resolve().parent, path)
        sys.argv = [self.target, *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = str(folder)
        # as python does since 3.9, __file__ is absolute
        main.__file__ = str(Path.cwd() / file)
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        if path.is_dir():
            main.__package__, main.__spec__ = "", importlib.util.spec_from_file_location("__main__", main.__file__)
        return compile(file_bytes(file), str(Path.cwd() / file), "exec")

    def _load_module(self, main: ModuleType) -> CodeType:
        sys.argv = ["-m", *self.arguments]
        name = self.target
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
        get_code = getattr(spec.loader, "get_code", None) if spec is not None else None  # as runpy does
        code: CodeType | None = get_code(name) if get_code is not None else None
        if spec is None or code is None:
            raise UsageError(f"there is no module {name!r} to run", hint="give a module of Python source")
        sys.argv[0] = spec.origin or name
        main.__dict__.update(
            __spec__=spec, __package__=spec.parent, __loader__=spec.loader, __file__=spec.origin, __cached__=spec.cached
        )
        return code


def _find_top(name: str) -> object:
    """The spec of a top-level module; to look for it imports nothing."""
    here = sys.path[0]
    sys.path[0] = str(Path.cwd())
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    finally:
        sys.path[0] = here


def _suggest(path: Path) -> str:
    if path.with_suffix(".py").is_file():
        return f"nanproof run {path.with_suffix('.py')}"
    if path.name.isidentifier() and _find_top(path.name) is not None:
        return f"give the path of a script, or nanproof run -m {path.name}"
    return "give the path of a script, or a command that starts one: nanproof run torchrun train.py"
