"""The examples in docstrings, one module at a time.

Collected here rather than by ``--doctest-modules``, which imports every module of the package, and with it every
library that one of them needs, in every worker before the first test.
"""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = sorted(
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for file in SOURCE.rglob("*.py")
    if re.search(r"^\s*>>> ", file.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert done.attempted, "none of them was found"
    assert done.failed == 0, "see the captured output"
