"""A module that is awaited is met whatever was done before it was imported."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nanproof.run.import_hooks import ImportHooks

NAME = "colorsys"


@pytest.fixture
def seen() -> Iterator[list[ModuleType]]:
    known, met = sys.modules.pop(NAME, None), list[ModuleType]()
    hooks = ImportHooks()
    hooks.await_module(NAME, met.append)
    yield met
    hooks.end()
    if known is not None:
        sys.modules[NAME] = known


def test_looking_for_a_module_is_not_importing_it(seen: list[ModuleType]) -> None:
    for _ in range(3):
        spec = importlib.util.find_spec(NAME)
        assert spec is not None
        assert spec.origin is not None
    assert seen == []
    module = importlib.import_module(NAME)
    assert seen == [module]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_a_module_that_came_in_through_an_earlier_finder(seen: list[ModuleType]) -> None:
    finder = next(f for f in sys.meta_path if getattr(f, "__name__", "") == "PathFinder")
    sys.meta_path.insert(0, finder)
    try:
        module = importlib.import_module(NAME)
        assert seen == []
    finally:
        sys.meta_path.pop(0)
    importlib.util.find_spec("a_module_that_is_not_there")  # any other import
    assert seen == [module]


def test_a_module_that_was_there_before(seen: list[ModuleType]) -> None:
    hooks, met = ImportHooks(), list[ModuleType]()
    hooks.await_module("json", met.append)
    hooks.end()
    assert [m.__name__ for m in met] == ["json"]
    assert seen == []


SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    pass
"""


def test_ctrl_c_that_a_library_swallows_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does while it loads NumPy: "Failed to initialize NumPy" is all that is left of the interrupt."""
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    monkeypatch.syspath_prepend(tmp_path)
    hooks, met = ImportHooks(), list[ModuleType]()
    hooks.await_module("swallows", met.append)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module("swallows")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        hooks.end()
    assert met == []
