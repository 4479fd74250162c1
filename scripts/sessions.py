"""Runs the sessions that pages show, and writes what the commands print today; with --check, only compares.

A page has sessions when it has files, or says ``<!-- session -->``. A fence below ``<!-- file: train.py -->`` is
written to that file in an empty folder. Then every ``text`` fence that begins with ``$ `` is run there from top to
bottom, and what a command prints, errors included, must be what the page shows. Decimals are not compared: the last
digits belong to the processor.
Pages marked ``<!-- slow -->`` are run by ``make docs`` alone.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w*\n(.*?)^```$", re.M | re.S)
SESSION = re.compile(r"^```text\n(\$ .*?)^```$", re.M | re.S)
MARK = re.compile(r"^<!-- (?:file: \S+|session) -->$", re.M)
COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)\n", re.M)


def pages() -> list[Path]:
    """Pages that show sessions."""
    return [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if MARK.search(p.read_text())]


def is_slow(page: Path) -> bool:
    return "<!-- slow -->" in page.read_text()


def play(text: str, folder: Path, bin_folder: Path | None = None) -> str:
    """The page's text with what its commands print now; ``bin_folder`` has the ``nanproof`` and ``python`` to use."""
    for name, content in FILE.findall(text):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    tools = Path(tempfile.mkdtemp())
    own = str(bin_folder / "python") if bin_folder else sys.executable
    for tool, command in (("python", own), ("nanproof", f"{own} -m nanproof")):
        (tools / tool).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (tools / tool).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k.startswith(("OMP", "ATEN", "ONEDNN", "LANG", "LC_", "HOME", "TMP"))}
    env |= {"PATH": f"{tools}:{os.environ['PATH']}", "COLUMNS": "100", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    if bin_folder is None:
        env["PYTHONPATH"] = str(ROOT / "src")

    def session(found: re.Match[str]) -> str:
        shown = []
        for command in COMMAND.findall(found[1]):
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=900,
                check=False,
            )
            printed = done.stdout.replace(f"{folder.resolve()}/", "").rstrip()
            shown += [f"$ {command}", *([printed] if printed else [])]
        return "```text\n" + "\n".join(shown) + "\n```"

    try:
        return SESSION.sub(session, text)
    finally:
        shutil.rmtree(tools)


def comparable(text: str) -> str:
    """The text without what differs between machines: decimals, sizes of memory, and the curve drawn of them."""
    text = re.sub(r"[-−]?\d+\.\d+(e[-+]?\d+)?", "0.0", text)
    text = re.sub(r"[▁▂▃▄▅▆▇█✗]{3,}", "curve", text)
    return re.sub(r"[ \t]+", " ", text)


def difference(page: Path, folder: Path, bin_folder: Path | None = None) -> str:
    """What a page shows otherwise than its commands print; empty when nothing."""
    text = page.read_text()
    old, new = comparable(text), comparable(play(text, folder, bin_folder))
    return "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), "shown", "printed", lineterm="", n=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = 0
    for page in options.page or pages():
        text = page.read_text()
        with tempfile.TemporaryDirectory() as folder:
            now = play(text, Path(folder))
        if comparable(now) != comparable(text):
            stale += 1
            print(f"{'out of date' if options.check else 'wrote'}: {page}")
            if not options.check:
                page.write_text(now)
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
