"""Runs the tests that depend on torch under the oldest, a middle and the newest torch, and writes docs/versions.md.

python scripts/versions.py                     # what `make versions` does
python scripts/versions.py 2.7.0 --keep .envs  # one version, in an environment that is kept for the next time

Each version gets an environment of its own, thrown away at the end; its row stays in runs/versions, and the page is
written when there is a row for each. The wheels come from the package index, CUDA
builds all of them; on a machine without a GPU they show that such a build works there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from nanproof.files import make_folder, write_atomic

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
ROWS = ROOT / "runs" / "versions"
VERSIONS = ("2.7.0", "2.10.0", "2.15.0")
"""The oldest that pyproject.toml claims, one between, and the newest."""
ROOMS = ("ops", "guard", "locating", "run", "checkpoint")
TESTS_NEED = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "jsonschema",
    "filelock",
    "setuptools<82",
    "tensorboard",
    "wandb",
    "mlflow-skinny",
    "sqlalchemy",
    "alembic",
    "trackio",  # that the guard writes to
)
FREE = re.compile(r"^(torch|triton|nvidia|sympy|setuptools|lightning|pytorch)", re.IGNORECASE)
"""Pinned for the version that nanproof is developed with; another torch brings its own."""
ABOUT = """
import json, platform, torch
print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "gpu": torch.cuda.is_available()}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where environments stay for the next time")
    given = parser.parse_args()
    claimed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["torch"]
    if claimed != [f"torch>={VERSIONS[0].removesuffix('.0')}"]:
        print(f"error: pyproject.toml claims {claimed}. Next: make it the first of VERSIONS in {__file__}")
        return 2
    with tempfile.TemporaryDirectory(prefix="nanproof-versions-") as scratch:
        for version in given.versions:
            row = check(version, given.keep or Path(scratch), Path(scratch))
            print(f"torch {row['torch']}: {count(row)}", flush=True)
            make_folder(ROWS)
            write_atomic(ROWS / f"{version}.json", json.dumps(row))
    rows = [json.loads(file.read_text()) for v in VERSIONS if (file := ROWS / f"{v}.json").exists()]
    if len(rows) == len(VERSIONS):
        write_atomic(PAGE, make_page(rows))
    return int(any(row["failed"] for row in rows))


def check(version: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """Build an environment with this torch and run the tests in it."""
    python = build(version, folder.resolve(), scratch)
    print(f"torch {version}: testing", flush=True)
    report = scratch / f"{version}.xml"
    tests = [f"tests/{room}" for room in ROOMS]
    words = ["-m", "pytest", *tests, "-q", "-n", "2", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([python, *words], cwd=ROOT, check=False)
    about: dict[str, Any] = json.loads(subprocess.check_output([python, "-c", ABOUT], text=True))
    passed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    failed = []
    for case in ET.parse(report).iter("testcase"):
        # a whole file that is skipped has a name only
        room = (case.get("classname") or case.get("name", "")).split(".")[1]
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            (skipped if case.find("skipped") is not None else passed)[room] += 1
    return about | {"passed": passed, "skipped": skipped, "failed": failed}


def build(version: str, folder: Path, scratch: Path) -> str:
    """An environment with this torch, the rest as pinned."""
    environment = folder / version
    python = str(environment / "bin" / "python")
    pins = scratch / "constraints.txt"
    pins.write_text("\n".join(x for x in (ROOT / "constraints.txt").read_text().splitlines() if not FREE.match(x)))
    if not environment.exists():
        print(f"torch {version}: installing", flush=True)
        venv.create(environment, with_pip=True)
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(pins)]
    extras = f"{ROOT}[plots,data,gguf,fast,remote]"
    subprocess.run([python, *install, f"torch=={version}", *TESTS_NEED, "-e", extras], check=True)
    return python


def count(row: dict[str, Any]) -> str:
    passed, skipped = (sum(row[kind].values()) for kind in ("passed", "skipped"))
    return f"{passed} passed, {skipped} skipped, {len(row['failed'])} failed"


def make_page(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Versions",
        "",
        "nanproof needs Python 3.11 or newer and torch 2.7 or newer. `make versions` installs the oldest torch, one",
        "between and the newest, each in an environment of its own, runs the tests that depend on torch",
        f"({', '.join(f'`tests/{room}`' for room in ROOMS)}),",
        "and writes this page. A test is skipped where that torch does not have what it tests (an optimizer, a float",
        "format), or where a trainer that it needs is not installed.",
        "",
        "| torch | Python | GPU | " + " | ".join(ROOMS) + " | skipped | failed |",
        "|---|---|---|" + "---|" * len(ROOMS) + "---|---|",
    ]
    failures: list[str] = []
    for row in rows:
        rooms = " | ".join(str(row["passed"].get(room, 0)) for room in ROOMS)
        gpu, skipped, failed = "yes" if row["gpu"] else "none", sum(row["skipped"].values()), row["failed"]
        lines.append(f"| {row['torch']} | {row['python']} | {gpu} | {rooms} | {skipped} | {len(failed)} |")
        failures += [f"- torch {row['torch']}: `{name}`" for name in failed]
    if failures:
        lines += ["", "## Failed", "", *failures]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
