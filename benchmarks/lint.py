"""How fast ``nanproof lint`` is: beside TorchFix on the same files, beside parsing alone, and in lines per second.

`report()` is what `benchmarks/run.py` calls; `python benchmarks/lint.py [--lines N]` prints it, smaller if told.
TorchFix gets a virtual environment of its own, made in a temporary folder (or the program named in ``$TORCHFIX`` is
used). All times are CPU seconds of whole processes, start included, one process at a time on one core.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from measure import verdict

PACKAGES = ("torch", "transformers")
ROUNDS = 3
PEER_LINES, OWN_LINES = 20_000, 400_000
SITE = Path(sysconfig.get_path("purelib"))
TREES = ("torch/optim", "torch/amp", "torch/nn", "torch/distributed/fsdp", "transformers/models", "transformers")
PARSE = "import ast, pathlib, sys\nfor p in pathlib.Path(sys.argv[1]).rglob('*.py'): ast.parse(p.read_bytes())"


def gather(target: Path, wanted: int) -> int:
    """Copy files of torch and transformers that mention torch until there are as many lines as wanted."""
    lines = 0
    for tree in TREES:
        for path in sorted((SITE / tree).rglob("*.py")):
            data = path.read_bytes()
            if lines >= wanted or b"torch" not in data or (target / path.relative_to(SITE)).exists():
                continue
            copy = target / path.relative_to(SITE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
            lines += data.count(b"\n")
    return lines


def spent(*command: str) -> float:
    """CPU seconds of a process and its children, which may use one core only."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    one = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if shutil.which("taskset") else []
    done = subprocess.run([*one, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    assert done.returncode in (0, 1), done.stderr.decode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def torchfix(folder: Path) -> str | None:
    """The program, installed if need be; None when that is not possible here."""
    if given := os.environ.get("TORCHFIX"):
        return given
    home = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    install = [str(home / "bin" / "pip"), "install", "--quiet", "torchfix==0.7.0", "setuptools<81"]
    return str(home / "bin" / "torchfix") if subprocess.run(install, check=False).returncode == 0 else None


def lint(tree: Path) -> float:
    return spent(sys.executable, "-m", "nanproof", "lint", "--quiet", str(tree))


def against_torchfix(folder: Path, wanted: int) -> str:
    tree = folder / "peer"
    lines = gather(tree, wanted)
    program = torchfix(folder)
    if program is None:
        return "| TorchFix 0.7 | | could not be installed here | ≥ 5 | |"
    ratios = []
    for _ in range(ROUNDS):
        ours = lint(tree)
        ratios.append(spent(program, "--select", "ALL", "-j", "1", str(tree)) / ours)
    found = statistics.median(ratios)
    return f"| TorchFix 0.7 | {lines:,} lines | {found:.0f} × as long | ≥ 5 | {verdict(found >= 5)} |"


def alone(folder: Path, wanted: int) -> list[str]:
    tree = folder / "own"
    lines = gather(tree, wanted)
    parse, ours = [], []
    for _ in range(ROUNDS):
        parse.append(spent(sys.executable, "-W", "ignore", "-c", PARSE, str(tree)))
        ours.append(lint(tree))
    speed, ratio = lines / min(ours), statistics.median(o / p for o, p in zip(ours, parse, strict=True))
    return [
        f"| nanproof lint, all rules on by default | {lines:,} lines | {speed:,.0f} lines/s | ≥ 50,000 |"
        f" {verdict(speed >= 50_000)} |",
        f"| `ast.parse` alone, for comparison | the same | {lines / min(parse):,.0f} lines/s | | |",
        f"| lint over `ast.parse` | the same | {ratio:.2f} × as long | | |",
    ]


def wild(paths: list[Path]) -> str:
    """Every file of the standard library and of all packages, linted and repaired in memory."""
    script = Path(__file__).parent.parent / "scripts" / "lint_wild.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *map(str, paths)], capture_output=True, text=True, check=False
    )
    words = done.stdout.splitlines()
    return f"{words[0] if words else done.stderr[-300:]}; gone wrong: {len(words) - 1 if words else 'all'}."


def report(peer_lines: int = PEER_LINES, own_lines: int = OWN_LINES, wild_paths: list[Path] | None = None) -> str:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = [against_torchfix(folder, peer_lines), *alone(folder, own_lines)]
    everything = [Path(sysconfig.get_path("stdlib")), SITE] if wild_paths is None else wild_paths
    head = ["| what | on | measured | to reach | |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, "", f"The standard library and all installed packages: {wild(everything)}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, help="how many lines to lint, for a quick try")
    options = parser.parse_args()
    if options.lines:
        print(report(options.lines, options.lines, [SITE / "accelerate"]))
    else:
        print(report())


if __name__ == "__main__":
    main()
