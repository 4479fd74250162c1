"""Runs the frameworks that people train large models with, bare and guarded, and writes docs/engines.md.

python scripts/engines.py                       # what `make engines` does: builds environments, runs every row
python scripts/engines.py ddp deepspeed         # only the rows whose name contains one of these words
python scripts/engines.py --keep .envs          # environments that stay for the next time

Each row is a loop of scripts/engines_loops.py, run twice: by itself, and under `nanproof run`. Both train once with a
bad batch on one rank and once without that batch; a row is equal when the guarded run with the bad batch ends, on every
rank, in the state of the bare run without it. A row that was not run keeps its line from the last time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

from nanproof.files import write_atomic

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "engines.md"
LOOPS = ROOT / "scripts" / "engines_loops.py"
RESULT = re.compile(r"RESULT (\d+) (bad|without) (\S+) (.*)")
NEEDS = ("numpy", "safetensors", "click", "rich", "PyYAML", "orjson")

INTRODUCTION = """# Engines

`make engines` runs each of these with the real library on CPUs and gloo: bare, and under `nanproof run`. Batch 7 of
rank 1 holds a NaN (pipelines: the gradient of one stage; TRL: one sample, or its reward). *Bare* is what the engine
alone makes of it. *Equal* says whether the guarded run ends, on every rank and bit for bit, in the state of the bare
run that never saw the batch, and whether the guard changes nothing in a run without it. *Seconds* are those of the
bare and of the guarded process, start included. Only what was run is in the table.

"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine in one setting."""

    name: str
    loop: str
    package: str = "torch"
    """Whose version is told; what an environment of its own is made for, if the project's does not have it."""
    install: tuple[str, ...] = ()
    world: int = 2
    launcher: str = "torchrun"


ROWS = (
    Row(name="DDP", loop="ddp"),
    Row(name="DDP nested in a module", loop="ddp nested"),
    Row(name="DDP, static_graph", loop="ddp nested static_graph"),
    Row(name="DDP, find_unused_parameters", loop="ddp find_unused_parameters"),
    Row(name="DDP, no_sync accumulation", loop="no_sync"),
    Row(name="FSDP2", loop="sharded"),
    Row(name="FSDP2 × TP (2×2)", loop="sharded tp", world=4),
    Row(name="HSDP (2×2)", loop="sharded hsdp", world=4),
    Row(name="pipeline, 1F1B", loop="pipeline"),
    Row(name="pipeline, interleaved 1F1B", loop="pipeline interleaved"),
    Row(name="Lightning Trainer, DDP", loop="lightning", package="lightning"),
    Row(name="Lightning Fabric, DDP", loop="fabric ddp", package="lightning"),
    Row(name="Lightning Fabric, FSDP2", loop="fabric fsdp2", package="lightning"),
    Row(name="Accelerate, DDP", loop="accelerate", package="accelerate"),
    Row(name="Accelerate, FSDP2 plugin", loop="accelerate fsdp2", package="accelerate"),
    Row(name="Accelerate, DeepSpeed plugin", loop="accelerate deepspeed", package="deepspeed",
        install=("deepspeed", "accelerate")),
    Row(name="TRL SFTTrainer", loop="trl sft", package="trl", launcher="python"),
    Row(name="TRL DPOTrainer", loop="trl dpo", package="trl", launcher="python"),
    Row(name="TRL GRPOTrainer, NaN reward", loop="trl grpo", package="trl", launcher="python"),
    *(Row(name=f"DeepSpeed ZeRO {stage}, {precision}", loop=f"deepspeed {stage} {precision}", package="deepspeed",
          install=("deepspeed", "accelerate")) for stage in range(4) for precision in ("fp32", "bf16")),
    Row(name="DeepSpeed ZeRO 1, bf16, check_grad_overflow: false", loop="deepspeed 1 bf16 unchecked",
        package="deepspeed", install=("deepspeed", "accelerate")),
    Row(name="Ray Train TorchTrainer", loop="ray", package="ray", install=("ray[train]",), launcher="ray"),
    Row(name="Megatron-Core DDP and optimizer", loop="megatron", package="megatron-core", install=("megatron-core",)),
    Row(name="Megatron-Core, overlapped reduction", loop="megatron overlap", package="megatron-core",
        install=("megatron-core",)),
    Row(name="Megatron-Core, distributed optimizer", loop="megatron distributed", package="megatron-core",
        install=("megatron-core",)),
    Row(name="Composer", loop="composer", package="mosaicml", install=("mosaicml",), launcher="python"),
    Row(name="Ignite", loop="ignite", package="pytorch-ignite", install=("pytorch-ignite",), launcher="python"),
    Row(name="skorch", loop="skorch", package="skorch", install=("skorch",), launcher="python"),
    Row(name="Keras 3 on torch", loop="keras", package="keras", install=("keras",), launcher="python"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where environments stay for the next time")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for one run (default 300)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the output of every run here")
    given = parser.parse_args()
    chosen = [r for r in ROWS if not given.words or any(w.lower() in r.name.lower() for w in given.words)]
    with tempfile.TemporaryDirectory(prefix="nanproof-engines-") as scratch:
        place = Path(scratch)
        out = (given.out or place / "out").resolve()
        unequal = 0
        for row in chosen:
            found = check(row, (given.keep or place).resolve(), out, given.timeout)
            print(f"{row.name}: bare {found['bare']}; guarded {found['guarded']}; {found['equal']}", flush=True)
            write_atomic(PAGE, make_page({**read_page(), row.name: found}))
            unequal += found["equal"] == "no"
    return int(unequal > 0)


def check(row: Row, folder: Path, out: Path, timeout: float) -> dict[str, str]:
    """Run a row, bare and guarded, and say how they compare."""
    try:
        python = build(row, folder)
    except subprocess.CalledProcessError as error:
        return {"version": "", "bare": "not installed", "guarded": f"pip said {error.returncode}", "equal": "not run"}
    code = f"import importlib.metadata as m; print(m.version({row.package!r}))"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    place = out / re.sub(r"\W+", "-", row.name)
    place.mkdir(parents=True, exist_ok=True)
    bare, _, bare_seconds = run(row, python, place, timeout, guarded=False)
    guarded, said, seconds = run(row, python, place, timeout, guarded=True)
    wanted = {rank: bare.get((rank, "without")) for rank in range(row.world if row.launcher != "python" else 1)}
    got = {rank: guarded.get((rank, "bad")) for rank in wanted}
    undisturbed = all(guarded.get((rank, "without")) == bare.get((rank, "without")) for rank in wanted)
    equal = all((end or "").startswith("finite") for end in wanted.values()) and got == wanted and undisturbed
    return {
        "version": f"{row.package} {version}", "bare": describe(bare, wanted),
        "guarded": describe(guarded, wanted, said),
        "equal": "yes" if equal else "told" if "not guarded:" in said and "EXC" not in str(bare) else "no",
        "seconds": f"{bare_seconds:.0f}, {seconds:.0f}",
    }  # fmt: skip


def build(row: Row, folder: Path) -> str:
    """The interpreter for a row: the project's own, or one of an environment that has the engine, too."""
    if not row.install:
        return sys.executable
    environment = folder / re.sub(r"\W+", "-", row.install[0])
    python = str(environment / "bin" / "python")
    done = environment / "installed.json"
    if not done.exists():
        print(f"{row.name}: installing {' '.join(row.install)}", flush=True)
        venv.create(environment, with_pip=True)
        torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
        words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", torch, *row.install, *NEEDS]
        subprocess.run([python, *words], check=True, timeout=1800)
        done.write_text(json.dumps(asdict(row)))
    return python


def run(
    row: Row, python: str, place: Path, timeout: float, *, guarded: bool
) -> tuple[dict[tuple[int, str], str], str, float]:
    """The RESULT lines of one run by rank and mode, all that it printed, and how long it took."""
    kind = "guarded" if guarded else "bare"
    records = place / "run"
    words = ["-m", "nanproof", "run", "--run-dir", str(records)] if guarded and row.launcher != "ray" else []
    words = [*words, str(LOOPS), *row.loop.split()]
    if row.launcher == "torchrun":
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.world}", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if guarded and row.launcher == "ray":
        environment["NANPROOF_RUN_DIR"] = str(records)
    start = time.monotonic()
    log = place / f"{kind}.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [python, *words], cwd=place, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            file.write(f"\nRESULT 0 bad HANG after {timeout:.0f} s\n")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - start
    said = log.read_text(errors="replace")
    found = {(int(r), mode): f"{result} {text}".strip() for r, mode, result, text in RESULT.findall(said)}
    return found, said, seconds


def describe(found: dict[tuple[int, str], str], ranks: dict[int, str | None], said: str = "") -> str:
    """A run with the bad batch in words."""
    ends = [found.get((rank, "bad"), "no result") for rank in ranks]
    kinds = sorted({e.partition(" ")[0] for e in ends})
    words = {"finite": "finite", "NON-FINITE": "weights not finite", "no": "no result", "HANG": "hangs"}
    text = ", ".join(words.get(k, "") or next(e for e in ends if e.startswith(k)).removeprefix("EXC ") for k in kinds)
    skips = re.findall(r"nanproof: .*?(\d+) skipped", said)
    told = re.search(r"nanproof: not guarded: (.*)", said)
    if said:
        text += f", {skips[0]} skipped" if skips else f", told: {told.group(1)}" if told else ""
    return text.replace("|", "/")


def read_page() -> dict[str, dict[str, str]]:
    """The rows of the page as it is."""
    rows: dict[str, dict[str, str]] = {}
    for line in PAGE.read_text().splitlines() if PAGE.exists() else []:
        cells = [c.strip() for c in line.strip("|").split(" | ")]
        if len(cells) == 6 and cells[0] in {r.name for r in ROWS}:
            keys = ("version", "bare", "guarded", "equal", "seconds")
            rows[cells[0]] = dict(zip(keys, cells[1:], strict=True))
    return rows


def make_page(known: dict[str, dict[str, str]]) -> str:
    lines = [
        *INTRODUCTION.splitlines(),
        "| engine | version | bare | guarded | equal | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        found = known.get(row.name)
        if found is not None and found["equal"] != "not run":
            cells = [row.name, *(found[k] for k in ("version", "bare", "guarded", "equal", "seconds"))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
