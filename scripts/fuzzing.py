"""Look for inputs that break a reader: ``make fuzz MINUTES=10``, or ``python scripts/fuzzing.py --target pickle``.

Each target runs in processes of its own, first under atheris, which keeps the inputs that reach new code and changes
them further, then without instruments at full speed on changed copies of what was kept. A child has a limit of memory
and a watch over what it executes, connects to or writes. All targets get equally many inputs. A campaign with
``--inputs`` and ``--seed`` resumes where it ended when the same line is typed again. An input that broke something is
kept below ``runs/fuzz``, and the line that repeats it is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None)
ROOT = Path(__file__).parents[1]
OUT = ROOT / "runs" / "fuzz"
# Not from fuzz.targets, which the first part imports with instruments.
TARGETS = (
    *("pickle", "zip", "weights", "safetensors", "gguf", "legacy", "dcp"),
    *("log", "events", "wandb", "config", "hydra", "override", "lint"),
)
SLOT = 30  # seconds that a target has at full speed before the next has its turn
GUIDED = 20  # seconds that a target has under atheris, at most
BLOCKED = 900  # seconds after its time at which a child is killed: it waits for something, and no signal wakes it
NUMBERS = ("inputs", "edges covered", "inputs kept", "crashes", "executions", "false healthy")
Numbers = dict[str, int]


def guide(chosen: list[str], until: float, folder: Path, seed: int) -> None:
    """The first part, under atheris; a fork for each target, all with the same instruments."""
    import atheris

    from fuzz import seeds

    with atheris.instrument_imports(include=["nanproof"]):
        from fuzz import targets
    for i, target in enumerate(chosen):
        end = time.monotonic() + min(GUIDED, (until - time.monotonic()) / (len(chosen) - i))
        corpus, scratch = folder / target, _scratch(target)
        with atheris.instrument_imports(include=["nanproof"]):
            seeds.write(target, corpus)
        targets.FOLDER = scratch
        code, said = _child(lambda t=target, c=corpus, e=end: _guided(t, e, c, seed), end, scratch)  # type: ignore[misc]
        count = re.findall(r"stat::number_of_executed_units: (\d+)", said) or re.findall(r"^#(\d+)", said, re.M)
        covered = re.findall(r"cov: (\d+)", said)
        found = dict.fromkeys(NUMBERS, 0) | {
            "inputs": int(count[-1]) if count else 0,
            "edges covered": int(covered[-1]) if covered else 0,
            "inputs kept": len(list(corpus.iterdir())),
        }
        if code:
            wrong = "fuzz.targets.Wrong" in said or " === Uncaught Python exception: ===\nWrong" in said
            found["executions" if code == 99 else "false healthy" if wrong else "crashes"] += 1
            _tell(target, next((p.read_bytes() for p in scratch.glob("broken-*")), b""), said[-20_000:])
        shutil.rmtree(scratch)
        _save(folder, target, found)


def _guided(target: str, until: float, corpus: Path, seed: int) -> None:
    import atheris

    from fuzz import seeds, targets

    with atheris.instrument_imports(include=["nanproof"]):
        targets.warm_up(target, corpus)  # most readers are imported when they are needed
    words = targets.FOLDER / "words.dict"
    words.write_text("".join(f'"{w}"\n' for w in seeds.DICTIONARY))
    options = [
        str(corpus),
        f"-dict={words}",
        f"-max_total_time={max(1, int(until - time.monotonic()))}",
        f"-artifact_prefix={targets.FOLDER}/broken-",
        "-rss_limit_mb=2048",
        "-timeout=25",
        "-max_len=4096",
        "-print_final_stats=1",
        "-verbosity=1",
        f"-seed={seed % 2**32}",
    ]

    def watch(event: str, args: tuple[object, ...]) -> None:
        if targets.is_violation(event, args):
            print("VIOLATION", event, str(args)[:200], file=sys.stderr, flush=True)
            os._exit(99)

    atheris.Setup([sys.argv[0], *options], targets.TARGETS[target])
    sys.addaudithook(watch)
    atheris.Fuzz()


def mutate(target: str, count: int | None, until: float, folder: Path, seed: int) -> None:
    """A turn of the second part, at full speed: at most so many inputs, changed otherwise than those before."""
    from fuzz import mutate

    found = _saved(folder, target)
    corpus, scratch = folder / target, _scratch(target)
    seed += found["inputs"] << 32
    code, said = _child(lambda: mutate.main(target, corpus, count, until, seed, scratch), until, scratch)
    last = json.loads(next((line for line in said.splitlines() if line.startswith('{"inputs"')), "{}"))
    count, data = mutate.UnderWay.read(scratch)
    found["inputs"] += last.get("inputs", count)
    if code or not last:
        kind = "executions" if "executed" in last else "false healthy" if "false" in last else "crashes"
        found[kind] += 1
        _tell(target, bytes.fromhex(last["data"]) if "data" in last else data, said[-20_000:])
    shutil.rmtree(scratch)
    _save(folder, target, found)


def _saved(folder: Path, target: str) -> Numbers:
    found: Numbers = json.loads((folder / f"{target}.json").read_text())
    return found


def _save(folder: Path, target: str, found: Numbers) -> None:
    from nanproof.files import write_atomic

    write_atomic(folder / f"{target}.json", json.dumps(found))


def _scratch(target: str) -> Path:
    """Where a target may write; in memory, for a disk needs 10 ms for each file that replaces another."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=f"nanproof-fuzz-{target}-", dir=memory))


def _child(work: Callable[[], None], until: float, scratch: Path) -> tuple[int, str]:
    """Run it in a fork, which need not import torch again; its exit code, and what it printed."""
    path = scratch / "printed"
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(scratch)
            with path.open("wb") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            # CPU seconds: a child that only waits for its turn on a busy machine has not failed
            limit = max(1, int(until - time.monotonic())) + 300
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            LIBC.exit(code)  # the frames above are the parent's; libFuzzer writes its input at the end of the process
    end, words = until + BLOCKED, ""
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end and not words:
            words = f"\nended after {BLOCKED} s in which it did not end by itself"
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1]), path.read_text(errors="replace") + words


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


def campaign(chosen: list[str], inputs: int | None, until: float, folder: Path, seed: int) -> None:
    """Both parts, until the time is over or all have their inputs; the target with the fewest is always next."""
    begun = [t for t in chosen if (folder / f"{t}.json").exists()]
    importlib.import_module("fuzz.seeds")  # torch, once for all forks
    if len(begun) < len(chosen):
        new = [t for t in chosen if t not in begun]
        guided = time.monotonic() + 0.3 * (until - time.monotonic())
        code, said = _child(lambda: guide(new, guided, folder, seed), until, folder)
        print("".join(line for line in said.splitlines(keepends=True) if not line.startswith("INFO:")), end="")
        if code:
            sys.exit("the first part, under atheris, did not end well")
    importlib.import_module("fuzz.targets")  # only now: the first part has it with instruments
    each = None if inputs is None else -(-inputs // len(chosen))
    slot = min(SLOT, (until - time.monotonic()) / len(chosen))
    while (now := time.monotonic()) < until:
        count, target = min((_saved(folder, t)["inputs"], t) for t in chosen)
        if each is not None and count >= each:
            break
        mutate(target, None if each is None else each - count, min(now + slot, until), folder, seed)


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="in all")
    parser.add_argument("--inputs", type=int, help="in all; ends before the minutes are over")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="that of an earlier campaign continues it")
    parser.add_argument("--keep", action="store_true", help="keep interesting inputs in tests/fuzz/corpus")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reliability.md")
    parser.add_argument("--input", type=Path, help="give one target this input only")
    options = parser.parse_args()
    begun = time.monotonic()
    chosen = options.target or list(TARGETS)
    if options.input is not None:
        from fuzz import targets

        targets.TARGETS[chosen[0]](options.input.read_bytes())
        return
    folder = OUT / str(options.seed)
    folder.mkdir(parents=True, exist_ok=True)
    campaign(chosen, options.inputs, begun + options.minutes * 60, folder, options.seed)
    found = {target: _saved(folder, target) for target in chosen}
    found["all"] = {k: sum(f[k] for f in found.values()) for k in NUMBERS}
    rows = ["| " + " | ".join(("target", *NUMBERS)) + " |", "|---" * (1 + len(NUMBERS)) + "|"]
    rows += [f"| {t} | " + " | ".join(f"{n:,}" for n in numbers.values()) + " |" for t, numbers in found.items()]
    print("\n".join(rows))
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes; go on with --seed {options.seed}")
    if options.keep:
        for target in chosen:
            keep(target, folder / target)
    if options.write:
        from written import write_table

        write_table("reliability.md", "fuzz", "\n".join(rows), ("atheris",))
    if any(found["all"][k] for k in NUMBERS[3:]):
        sys.exit(1)


if __name__ == "__main__":
    main()
