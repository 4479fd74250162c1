"""Every example in the docstrings and on the page about the operations runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import nanproof.ops
import nanproof.testing

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [
    f"{package.__name__}.{found.name}"
    for package in (nanproof.ops, nanproof.testing)
    for found in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", ["nanproof.ops", *MODULES])
def test_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert result.failed == 0


def test_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "ops.md"
    result = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS)
    assert result.failed == 0
    assert result.attempted > 20
