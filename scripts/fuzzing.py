"""Look for inputs that break a reader: ``make fuzz MINUTES=10``, or ``python scripts/fuzzing.py --target pickle``.

Each target runs in a process of its own, first under atheris, which keeps the inputs that reach new code and changes
them further, then without instruments at full speed on changed copies of what was kept. A child has a limit of memory
and a watch over what it executes, connects to or writes. An input that broke something is kept below ``runs/fuzz``, and
the line that repeats it is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "runs" / "fuzz"
# Parts of the time: the pickle machine is the one that matters most, and a linter is slow.
SHARES = {"pickle": 6, "weights": 3, "zip": 3, "safetensors": 3, "legacy": 3, "override": 2}

CHILD = """
import os, sys
sys.path.insert(0, {tests!r})
import atheris
from pathlib import Path
with atheris.instrument_imports(include=["nanproof"]):
    import fuzz.targets
    fuzz.targets.FOLDER = Path({scratch!r})
    fuzz.targets.warm_up({target!r}, Path({corpus!r}))  # most readers are imported when they are needed
target = fuzz.targets.TARGETS[{target!r}]
def watch(event, args):
    if fuzz.targets.is_violation(event, args):
        print("VIOLATION", event, str(args)[:200], file=sys.stderr, flush=True)
        os._exit(99)
atheris.Setup([sys.argv[0], *{options!r}], target)
sys.addaudithook(watch)
atheris.Fuzz()
"""


NUMBERS = ("inputs", "edges covered", "inputs kept", "crashes", "executions", "false healthy")
Numbers = dict[str, int]


def run(target: str, seconds: float, folder: Path, seed: int) -> Numbers:
    """One target for some time: how many inputs it had, what it covers, and what broke it."""
    found = guide(target, seconds * 0.25, folder)
    command = [sys.executable, "-m", "fuzz.mutate", target, str(folder / target), str(seconds * 0.75), str(seed)]
    child = _child([*command, str(folder / f"{target}-files")], seconds, ROOT / "tests")
    last = json.loads((child.stdout.splitlines() or ["{}"])[-1])
    found["inputs"] += last.get("inputs", 0)
    if child.returncode or "inputs" not in last:
        kind = "executions" if "executed" in last else "false healthy" if "false" in last else "crashes"
        found[kind] += 1
        _tell(target, bytes.fromhex(last.get("data", "")), child.stdout[-20_000:] + child.stderr[-20_000:])
    return found


def guide(target: str, seconds: float, folder: Path) -> Numbers:
    """The first part, under atheris."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fuzz.seeds import DICTIONARY, write

    corpus, scratch = folder / target, folder / f"{target}-files"
    scratch.mkdir(parents=True)
    write(target, corpus)
    words = folder / "words.dict"
    words.write_text("".join(f'"{w}"\n' for w in DICTIONARY))
    options = [
        str(corpus), f"-dict={words}", f"-max_total_time={int(seconds)}", f"-artifact_prefix={scratch}/broken-",
        "-rss_limit_mb=2048", "-timeout=25", "-max_len=4096", "-print_final_stats=1", "-verbosity=1",
    ]  # fmt: skip
    code = CHILD.format(
        tests=str(ROOT / "tests"), target=target, scratch=str(scratch), corpus=str(corpus), options=options
    )
    child = _child([sys.executable, "-c", code], seconds, folder)
    said = child.stdout + child.stderr
    count = re.findall(r"stat::number_of_executed_units: (\d+)", said) or re.findall(r"^#(\d+)", said, re.M)
    covered = re.findall(r"cov: (\d+)", said)
    found = dict.fromkeys(NUMBERS, 0) | {
        "inputs": int(count[-1]) if count else 0, "edges covered": int(covered[-1]) if covered else 0,
        "inputs kept": len(list(corpus.iterdir())),
    }  # fmt: skip
    if child.returncode:
        wrong = "fuzz.targets.Wrong" in said or " === Uncaught Python exception: ===\nWrong" in said
        found["executions" if child.returncode == 99 else "false healthy" if wrong else "crashes"] += 1
        _tell(target, next((p.read_bytes() for p in scratch.glob("broken-*")), b""), said[-20_000:])
    return found


def _child(command: list[str], seconds: float, place: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds + 300, cwd=place, env=environment
    )


def _tell(target: str, data: bytes, said: str) -> None:
    """Keep an input that broke something, and print the line that repeats it."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    path.with_suffix(".log").write_text(said)
    words = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    print(f"{words[:300]}\npython scripts/fuzzing.py --target {target} --input {path.relative_to(ROOT)}", flush=True)


def keep(target: str, corpus: Path, most: int = 40) -> None:
    """The smallest of the inputs that reached new code, for the tests."""
    found = sorted((p.read_bytes() for p in corpus.iterdir() if 0 < p.stat().st_size <= 300), key=len)[::-1]
    step = max(1, len(found) // most)
    path = ROOT / "tests" / "fuzz" / "corpus" / f"{target}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(data.hex() + "\n" for data in found[::step][:most]))


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", action="store_true", help="keep interesting inputs in tests/fuzz/corpus")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reliability.md")
    parser.add_argument("--input", type=Path, help="give one target this input only")
    options = parser.parse_args()
    chosen = options.target or list(TARGETS)
    if options.input is not None:
        TARGETS[chosen[0]](options.input.read_bytes())
        return
    parts = sum(SHARES.get(t, 1) for t in chosen)
    total = dict.fromkeys(NUMBERS, 0)
    rows = ["| " + " | ".join(("target", *NUMBERS)) + " |", "|---" * (1 + len(NUMBERS)) + "|"]
    print("\n".join(rows), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for target in chosen:
            seconds = options.minutes * 60 * SHARES.get(target, 1) / parts
            found = run(target, seconds, Path(folder), options.seed)
            rows.append(f"| {target} | " + " | ".join(f"{n:,}" for n in found.values()) + " |")
            print(rows[-1], flush=True)
            total = {k: total[k] + found[k] for k in total}
            if options.keep:
                keep(target, Path(folder) / target)
    rows.append("| all | " + " | ".join(f"{n:,}" for n in total.values()) + " |")
    print(rows[-1])
    if options.write:
        from written import write_table

        write_table("reliability.md", "fuzz", "\n".join(rows), ("atheris",))
    if any(total[k] for k in NUMBERS[3:]):
        sys.exit(1)


if __name__ == "__main__":
    main()
