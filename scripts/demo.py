"""The demo: a training run dies, one command finds its cure, and the cured run trains.

python scripts/demo.py --out runs/demo

Every stage is a command that a user would type; it runs in a process of its own and prints what it prints. The cured
run is the command that `nanproof cure` has printed, whatever that is.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from nanproof.files import make_folder, write_atomic

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "cure" / "tune" / "two_halves"
FIRST, LAST = 4, 3
"""Lines of a training that are shown; those between are counted."""


def run(number: int, title: str, typed: str, folder: Path, *, fold: bool) -> int:
    """Run one command as it was typed, with `python` and `nanproof` being those of this environment."""
    print(f"\n{number}. {title}\n   $ {typed}", flush=True)
    environment = dict(os.environ)
    words = shlex.split(typed)
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    words = [sys.executable, "-m", *words] if words[0] == "nanproof" else [sys.executable, *words[1:]]
    lines: list[str] = []
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip("\n"))
            if not fold or len(lines) <= FIRST:
                print(f"   {lines[-1]}", flush=True)
    rest = lines[FIRST:] if fold else []
    shown = [n for n, line in enumerate(rest) if n >= len(rest) - LAST or "(chance " in line]  # the metric is the point
    for before, n in zip([-1, *shown], shown, strict=False):
        if n > before + 1:
            print(f"   … {n - before - 1} more lines …")
        print(f"   {rest[n]}")
    return child.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = make_folder(parser.parse_args().out / "project")
    for source in PROGRAM.iterdir():
        if source.is_file():
            write_atomic(folder / source.name, source.read_bytes())
    began = time.monotonic()
    run(1, "A training run dies", "python train.py", folder, fold=True)
    code = run(2, "Find a cure", "nanproof cure --out cure -- python train.py", folder, fold=False)
    found = json.loads((folder / "cure" / "cure.json").read_text())
    if code != 0:
        print(f"\nno cure was found here: {found['answer']}")
        return 1
    code = run(3, "The cured run trains", found["remedy"], folder, fold=True)
    print(f"\n{time.monotonic() - began:.0f} s; all curves: {folder / 'cure' / 'report.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
