"""How long the command line takes to start, over what Python itself takes; CPU seconds of whole processes."""

from __future__ import annotations

import resource
import subprocess
import sys

from measure import interleave, ratio

PACKAGES = ("click", "numpy")
COMMANDS = {
    "python": ("-c", "pass"),
    "--help": ("-m", "nanproof", "--help"),
    "lint --help": ("-m", "nanproof", "lint", "--help"),
    "explain fp16": ("-m", "nanproof", "explain", "fp16"),
    "import numpy": ("-c", "import numpy"),
    "import torch": ("-c", "import torch"),
}


def spent(*words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def report() -> str:
    variants = {name: lambda words=words: spent(*words) for name, words in COMMANDS.items()}
    times = interleave(variants, seconds=0, warmup=1, least=12)
    rows = [
        f"| `{name if name.startswith('import') else 'nanproof ' + name}` | "
        f"{ratio(times, name, 'python').show('{:.1f}')} |"
        for name in COMMANDS
        if name != "python"
    ]
    return "\n".join(["| command | over `python -c pass` |", "|---|---|", *rows])


if __name__ == "__main__":
    print(report())
