"""docs/cases/NAME.md: the story of a case with its figures, as measured."""

from __future__ import annotations

import importlib
import inspect
import os
import platform
from pathlib import Path

import torch

from .. import files
from .catalogue import Case
from .compare import Comparison, Table, changes_table, claims_table, variants_table


def write_page(case: Case, found: Comparison, path: Path) -> None:
    """Write what a comparison found as a page."""
    files.write_atomic(path, make_page(case, found))


def make_page(case: Case, found: Comparison) -> str:
    introduction = inspect.cleandoc(importlib.import_module(case.module).__doc__ or "")
    ticks = "\n".join(f"- [x] **{r.number}** {r.wish}: {_commands(r.shown_by)}" for r in case.requirements)
    here = f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, CPU, seed {found.seed}"
    return f"""# {case.name}

{introduction}

<!-- written by: nanproof case {case.name} --compare --seed {found.seed} --page {{this file}} -->

Measured with {here}. Steps and scores differ between processors; that the original dies, and of what, does
not ([portability](README.md#on-any-machine)).

## Three variants

{_markdown(variants_table(found.results))}

## What its post-mortem recommended

Each recommendation alone, put into the original, and judged by what it did.

{_markdown(claims_table(found.judged))}

## What the stable variant does

{_markdown(changes_table(case))}

## What its users asked for, and what shows it

{ticks}

## See it yourself

```console
$ nanproof case {case.name} --variant original
$ nanproof case {case.name} --story
$ nanproof case {case.name} --compare
```
"""


def _markdown(table: Table) -> str:
    names, rows = table
    lines = [names, tuple("---" for _ in names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _commands(joined: str) -> str:
    return "; ".join(f"`{command}`" for command in joined.split(" ; "))
