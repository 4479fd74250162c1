"""Writes the generated parts of docs/ from the program itself; with --check, only says what is out of date."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
from schemas import schemas
from walk import page as walk_page

from nanproof.cli.shell import nanproof
from nanproof.files import make_folder, write_atomic
from nanproof.records import Incident
from nanproof.schema import schema_of

DOCS = Path(__file__).parent.parent / "docs"


def cli_page() -> str:
    """The command-line reference: what --help prints, verb by verb."""
    parts = ["# Command line", "", "Generated from `--help`; regenerate with `make docs`.", ""]
    root = click.Context(nanproof, info_name="nanproof", max_content_width=100, terminal_width=100)
    pages = [("nanproof", nanproof.get_help(root))]
    for name in nanproof.list_commands(root):
        command = nanproof.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root, max_content_width=100, terminal_width=100)
        pages.append((f"nanproof {name}", command.get_help(context)))
    for title, text in pages:
        parts += [f"## {title}", "", "```text", text, "```", ""]
    return "\n".join(parts)


def cause_pages() -> dict[str, str]:
    """A page for each cause of failures, and the list of all."""
    from nanproof.diagnosing.causes import all_causes

    causes = sorted(all_causes(), key=lambda c: c.name)
    rows = [f"| [{c.name}]({c.name}.md) | {c.title} |" for c in causes]
    head = ["# Causes", "", "What `nanproof diagnose` can name; `nanproof explain NAME` prints the same page.", ""]
    index = "\n".join([*head, "| cause | what it is |", "|---|---|", *rows, ""])
    return {f"{c.name}.md": c.topic.markdown() for c in causes} | {"README.md": index}


def main(check: bool) -> int:
    from nanproof.linting.catalogue import pages as rule_pages

    pages = {
        **{DOCS / "rules" / name: text for name, text in rule_pages().items()},
        **{DOCS / "causes" / name: text for name, text in cause_pages().items()},
        DOCS / "cli.md": cli_page(),
        DOCS / "architecture-walk.md": walk_page(),
        DOCS / "incident.schema.json": json.dumps(schema_of(Incident), indent=2) + "\n",
        **{DOCS / "schemas" / name: json.dumps(schema, indent=2) + "\n" for name, schema in schemas().items()},
    }
    stale = [p for p, text in pages.items() if not p.exists() or p.read_text() != text]
    orphans = [p for folder in ("rules", "causes", "schemas") for p in (DOCS / folder).glob("*") if p not in pages]
    for path in orphans:
        print(f"{'left over' if check else 'removed'}: {path.relative_to(DOCS.parent)}")
        if not check:
            path.unlink()
    for path in stale:
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(DOCS.parent)}")
        if not check:
            make_folder(path.parent)
            write_atomic(path, pages[path])
    ops = [sys.executable, str(Path(__file__).with_name("ops_table.py")), *(["--check"] if check else [])]
    failed = subprocess.run(ops, check=False).returncode != 0
    if check and (stale or orphans or failed):
        print("Next: make docs, read the difference, commit it")
    return int((check and bool(stale or orphans)) or failed)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    sys.exit(main("--check" in sys.argv))
