"""Run the benchmarks and write what they measured into docs/: `python benchmarks/run.py [name …]`.

A benchmark is a module beside this one. Either it has a function ``report() -> str`` that measures and returns
Markdown, which goes between its two markers in docs/performance.md under a line of versions (of the packages it
names in ``PACKAGES``); or it is a script that keeps a page of its own and is called with ``--write``. Rows that end
in a verdict are gathered in one table at the top of docs/performance.md.
"""

from __future__ import annotations

import compileall
import importlib
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import nanproof
from nanproof.files import write_atomic

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
OTHER_PAGES = {"scan": PAGE.with_name("scan.md"), "run_cost": PAGE.with_name("run.md")}
BENCHMARKS = ("guard", "locate", "heal", "scan", "remote", "lint", "logs", "run_cost", "watch", "start", "growth")


def machine(packages: tuple[str, ...]) -> str:
    """What the numbers below were measured with."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("nanproof", *packages))
    return f"Python {platform.python_version()}, {versions}; {platform.machine()}, {os.cpu_count()} cores."


def replace(page: str, name: str, text: str) -> str:
    """Put a text between the markers of a benchmark; a benchmark that the page does not know yet goes to its end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in page:
        page = f"{page.rstrip()}\n\n## {name.capitalize()}\n\n{begin}\n{end}\n"
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def figures(texts: dict[str, str]) -> str:
    """Every row that says whether a figure was reached, with the part of the page that it is from."""
    rows = ["| of | figure | to reach | measured | |", "|---|---|---|---|---|"]
    for name, text in texts.items():
        head: list[str] = []
        for line in text.splitlines():
            if not line.startswith("|"):
                head = []
            elif not head:
                head = cells(line)
            elif cells(line)[-1].lstrip("*").startswith(("reached", "not reached")):
                row = dict(zip(head, cells(line), strict=False))
                measured = next(row[key] for key in ("measured", "CPU time", "median") if key in row)
                what = row[head[0]] + "".join(f", {word} {row[word]}" for word in ("on", "over") if row.get(word))
                rows.append(
                    f"| {name.replace('_cost', '')} | {what} | {row['to reach']} | {measured} | {cells(line)[-1]} |"
                )
    return "\n".join(rows)


def gather() -> None:
    """Write the table at the top of the page from what stands below it and on other pages."""
    page = PAGE.read_text(encoding="utf-8")
    texts = {n: p.read_text(encoding="utf-8") for n, p in OTHER_PAGES.items()}
    for name in BENCHMARKS:
        if f"<!-- {name}: begin -->" in page:
            texts[name] = page.split(f"<!-- {name}: begin -->")[1].split(f"<!-- {name}: end -->")[0]
    ordered = {name: texts[name] for name in BENCHMARKS if name in texts}
    write_atomic(PAGE, replace(page, "figures", figures(ordered)))


def run(name: str) -> bool:
    """Run one benchmark; false when it failed."""
    script = HERE / f"{name}.py"
    if not script.exists():
        print(f"{name}: there is no benchmarks/{script.name}, left out")
        return True
    print(f"{name}: measuring …", flush=True)
    module = importlib.import_module(name)
    if not hasattr(module, "report"):
        return subprocess.run([sys.executable, str(script), "--write"], check=False).returncode == 0
    text = f"{machine(getattr(module, 'PACKAGES', ()))}\n\n{module.report()}"
    write_atomic(PAGE, replace(PAGE.read_text(encoding="utf-8"), name, text))
    print(f"{text}\n\n{name}: written to docs/{PAGE.name}", flush=True)
    return True


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        print(f"no benchmark {unknown[0]!r}. Next: choose from {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    compileall.compile_dir(Path(nanproof.__file__).parent, quiet=1)  # as pip does when it installs
    failed = [name for name in names or BENCHMARKS if not run(name)]
    gather()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
