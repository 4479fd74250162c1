"""Runs the frameworks that people train large models with, bare and guarded, and writes docs/engines.md.

python scripts/engines.py                       # what `make engines` does: builds environments, runs every row
python scripts/engines.py ddp deepspeed         # only the rows whose name contains one of these words
python scripts/engines.py --again ddp           # also rows that were measured with this code before

Each row is a loop of scripts/engines_loops.py, run twice: by itself, and under `nanproof run`. Both train once with a
bad batch on one rank and once without that batch; a row is equal when the guarded run with the bad batch ends, on every
rank, in the state of the bare run without it. Each row that was measured is kept in runs/engines, so an interrupted
campaign resumes where it was. Environments stay in runs/engines/envs, or where ``--envs`` says.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanproof.files import write_atomic

ROOT = Path(__file__).parent.parent
PAGE, RUNS = ROOT / "docs" / "engines.md", ROOT / "runs" / "engines"
LOOPS, RANKS = ROOT / "scripts" / "engines_loops.py", ROOT / "scripts" / "engines_ranks.py"
RESULT = re.compile(r"RESULT (\d+) (bad|without) (\S+) (.*)")
SKIPPED = re.compile(r"nanproof: .*?(\d+) skipped")
LOCATED = re.compile(r"nanproof: step \d+: .*\.py:\d+[: ]")
REWARD = re.compile(r"nanproof: step \d+: reward function \w+ returned (\w+)")
NOT_GUARDED = re.compile(r"nanproof: NOT GUARDED: (.*)")
CODE = ("src/nanproof", "scripts/engines_loops.py", "scripts/engines_data.py", "scripts/engines_ranks.py")
"""Rows are measured again when a commit changes one of these."""
TESTS = {
    "deepspeed": ("integrations/test_deepspeed.py",),
    "ray": ("integrations/test_ray.py", "checkpoint/test_far.py::test_a_thousand_shards_as_tasks_of_ray"),
}
"""What equality alone does not show, in tests/: they are skipped where the engine is not installed."""
CELLS = ("version", "commit", "bare", "guarded", "equal", "seconds")

INTRODUCTION = """# Engines

`make engines` runs each of these with the real library on CPUs and gloo: bare, and under `nanproof run`. Batch 7 of
rank 1 contains a NaN (pipelines: the gradient of one stage; TRL: one sample, or its reward). Only what was run is in
the table.

- **bare**: the result of the engine alone.
- **guarded**: the result under `nanproof run`. *Located* means that the printed incident names the rank and the line.
- **equal**: *yes* means that, on every rank and bit for bit, the guarded run ends in the state of the bare run that
  never saw the batch, and that the guard changes nothing in a run without it. *As alone*: the engine itself skipped the
  step and moved its loss scale, and the guarded run ends in the same state. *Told*: steps of this engine cannot be
  vetoed, and `nanproof run` reports that at the first one.
- **seconds**: those of the bare and of the guarded ranks, forked from a process that has already imported torch.

"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine in one setting."""

    name: str
    loop: str
    package: str = "torch"
    """Whose version is told."""
    install: tuple[str, ...] = ()
    """What pip installs into an environment of its own; none where the project's environment has it."""
    preload: tuple[str, ...] = ("torch.distributed.fsdp", "torch._dynamo", "nanproof.run.session")
    """What is imported once, before ranks are forked; not what `nanproof run` has to see being imported."""
    world: int = 2
    launched: bool = True
    """Whether ranks are started from outside, as by torchrun."""

    @property
    def folder(self) -> str:
        """Its environment's name."""
        return re.sub(r"\W+", "-", self.package)


def _deepspeed(stage: int, precision: str, more: str = "") -> Row:
    return Row(
        name=f"DeepSpeed ZeRO {stage}, {precision}" + (f", {more}" if more else ""),
        loop=f"deepspeed {stage} {precision}" + (" unchecked" if more else ""),
        package="deepspeed",
        install=("deepspeed",),
        preload=("deepspeed", "nanproof.run.session"),
    )


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
    Row(name="torchtitan-style loop: FSDP2, accumulation, schedule", loop="titan"),
    Row(name="torchtune-style recipe: loss per token over all ranks", loop="tune"),
    Row(name="Lightning Trainer, DDP", loop="lightning ddp", package="lightning"),
    Row(name="Lightning Trainer, FSDP2", loop="lightning fsdp2", package="lightning"),
    Row(name="Lightning Fabric, DDP", loop="fabric ddp", package="lightning"),
    Row(name="Lightning Fabric, FSDP2", loop="fabric fsdp2", package="lightning"),
    Row(name="Accelerate, DDP", loop="accelerate", package="accelerate"),
    Row(name="Accelerate, FSDP2 plugin", loop="accelerate fsdp2", package="accelerate"),
    Row(name="Accelerate, DeepSpeed plugin", loop="accelerate deepspeed", package="deepspeed", install=("deepspeed",)),
    Row(name="TRL SFTTrainer", loop="trl sft", package="trl"),
    Row(name="TRL DPOTrainer", loop="trl dpo", package="trl"),
    Row(name="TRL GRPOTrainer, NaN reward (TRL leaves it out)", loop="trl grpo nan", package="trl"),
    Row(name="TRL GRPOTrainer, infinite reward", loop="trl grpo inf", package="trl"),
    *(_deepspeed(stage, precision) for stage in range(4) for precision in ("fp32", "bf16", "fp16")),
    _deepspeed(1, "bf16", "check_grad_overflow: false"),
    Row(name="Ray Train TorchTrainer", loop="ray", package="ray", install=("ray[train]",), launched=False),
    *(
        Row(name=f"Megatron-Core, {name}", loop=f"megatron {loop}", package="megatron-core", install=("megatron-core",))
        # its distributed optimizer takes CUDA tensors only
        for name, loop in (("DDP and optimizer", ""), ("overlapped reduction", "overlap"))
    ),
    Row(
        name="Composer",
        loop="composer",
        package="mosaicml",
        install=(
            # all that it imports: what it declares asks for an older torch
            "--no-deps",
            "mosaicml",
            "mosaicml-cli",
            "torchvision==0.28.0",
            "coolname",
            "py-cpuinfo",
            "tabulate",
            "zipp",
            "torch_optimizer",
            "pytorch_ranger",
            "importlib_metadata",
            "backoff",
            "gql",
            "tenacity",
            "questionary",
            "validators",
        ),
    ),
    Row(name="Ignite", loop="ignite", package="pytorch-ignite", install=("pytorch-ignite",)),
    Row(name="skorch", loop="skorch", package="skorch", install=("skorch",)),
    Row(name="Keras 3 on torch", loop="keras", package="keras", install=("keras",), world=1, launched=False),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--again", action="store_true", help="measure rows again that this code was measured with")
    parser.add_argument("--envs", type=Path, metavar="FOLDER", default=RUNS / "envs", help="where environments are")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for one run (default 300)")
    given = parser.parse_args()
    chosen = [r for r in ROWS if not given.words or any(w.lower() in r.name.lower() for w in given.words)]
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", *CODE], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    RUNS.mkdir(parents=True, exist_ok=True)
    unequal, tested = 0, set[str]()
    for row in chosen:
        try:
            python = build(row, given.envs.resolve())
        except subprocess.CalledProcessError as error:
            print(f"{row.name}: not run, pip exited with {error.returncode}", flush=True)
            continue
        found = known(row)
        now = {"version": f"{row.package} {version_of(row, python)}", "commit": commit}
        if given.again or any(found.get(k) != v for k, v in now.items()):
            found = {**now, **check(row, python, given.timeout)}
            write_atomic(record_of(row), json.dumps(found, indent=1))
            write_atomic(PAGE, make_page())
        print(f"{row.name}: bare {found['bare']}; guarded {found['guarded']}; {found['equal']}", flush=True)
        unequal += found["equal"] == "no"
        if row.package in TESTS and row.package not in tested:
            tested.add(row.package)
            tests = [f"tests/{name}" for name in TESTS[row.package]]
            unequal += subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False).returncode != 0
    return int(unequal > 0)


def build(row: Row, folder: Path) -> str:
    """The interpreter for a row: the project's own, or that of an environment on top of it that has the engine."""
    if not row.install:
        return sys.executable
    environment = folder / row.folder
    python, done = environment / "bin" / "python", environment / "installed.json"
    if not done.exists():
        print(f"{row.name}: installing {' '.join(row.install)}", flush=True)
        venv.create(environment, with_pip=True)
        version = "python" + sysconfig.get_python_version()
        # what the project has is found from here and not installed again, torch above all
        (environment / "lib" / version / "site-packages" / "project.pth").write_text(sysconfig.get_path("purelib"))
        pins = environment / "pins.txt"
        pins.write_text(f"torch=={importlib.metadata.version('torch').partition('+')[0]}\n")
        words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(pins), *row.install]
        subprocess.run([python, *words], check=True, timeout=1800)
        done.write_text(json.dumps(row.install))
    return str(python)


def version_of(row: Row, python: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({row.package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def check(row: Row, python: str, timeout: float) -> dict[str, str]:
    """Run a row, bare and guarded, and say how they compare."""
    place = record_of(row).with_suffix("")
    place.mkdir(exist_ok=True)
    ends = {}
    for kind in ("bare", "guarded"):
        words, more = [str(LOOPS), *row.loop.split()], {}
        if kind == "guarded" and row.package == "ray":  # its workers are guarded through nanproof.integrations.ray
            more["GUARDED"] = str(place / "run")
        elif kind == "guarded":
            words = ["-m", "nanproof", "run", "--run-dir", str(place / "run"), *words]
        ends[kind] = ask(
            row,
            python,
            {
                "folder": str(place),
                "output": str(place / f"{kind}.txt"),
                "words": words,
                "timeout": timeout,
                "world": row.world if row.launched else 1,
                "launched": row.launched,
                "environment": more,
            },
        )
    bare, _ = read(place / "bare.txt", ends["bare"])
    guarded, said = read(place / "guarded.txt", ends["guarded"])
    wanted = {rank: bare.get((rank, "without")) for rank in range(row.world)}
    got = {rank: guarded.get((rank, "bad")) for rank in wanted}
    undisturbed = all(guarded.get((rank, "without")) == wanted[rank] for rank in wanted)
    alone = {rank: bare.get((rank, "bad")) for rank in wanted}
    fine = [ends for ends in (wanted, alone) if all((end or "").startswith("finite") for end in ends.values())]
    told = NOT_GUARDED.search(said) is not None and "EXC" not in str(bare)
    equal = "no" if not undisturbed or got not in fine else "yes" if got == wanted else "as alone"
    return {
        "bare": describe(bare, wanted),
        "guarded": describe(guarded, wanted, said),
        "equal": "told" if equal == "no" and told else equal,
        "seconds": ", ".join(f"{end['seconds']:.0f}" for end in ends.values()),
    }


def ask(row: Row, python: str, job: dict[str, Any]) -> dict[str, Any]:
    """Let the process that forks the ranks of an environment do a job; it stays for the next row."""
    words = (python, str(RANKS), *row.preload)
    if words not in _starters:
        for other in list(_starters):  # one at a time: each holds torch
            _starters.pop(other).terminate()
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        _starters[words] = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    starter = _starters[words]
    assert starter.stdin is not None
    assert starter.stdout is not None
    starter.stdin.write(json.dumps(job) + "\n")
    starter.stdin.flush()
    return dict(json.loads(starter.stdout.readline()))


_starters: dict[tuple[str, ...], subprocess.Popen[str]] = {}


def read(output: Path, ended: dict[str, Any]) -> tuple[dict[tuple[int, str], str], str]:
    """The RESULT lines of one run by rank and mode, and all that it printed."""
    said = output.read_text(errors="replace")
    found = {(int(r), mode): f"{result} {text}".strip() for r, mode, result, text in RESULT.findall(said)}
    for rank in ended["hung"]:  # also one that has printed its results and then does not end
        found[rank, "bad"] = "HANG"
    return found, said


def describe(found: dict[tuple[int, str], str], ranks: dict[int, str | None], said: str = "") -> str:
    """A run with the bad batch in words."""
    ends = [found.get((rank, "bad"), "no result") for rank in ranks]
    kinds = sorted({e.partition(" ")[0] for e in ends})
    words = {"finite": "finite", "NON-FINITE": "weights not finite", "no": "no result", "HANG": "hangs"}
    text = ", ".join(words.get(k, "") or next(e for e in ends if e.startswith(k)).removeprefix("EXC ") for k in kinds)
    skips, told = SKIPPED.search(said), NOT_GUARDED.search(said)
    text += f", {skips[1]} skipped" if skips else f", told: {told[1]}" if told else ""
    text += ", located" if LOCATED.search(said) else ", reward named" if REWARD.search(said) else ""
    return text.replace("|", "/")


def record_of(row: Row) -> Path:
    return RUNS / (re.sub(r"\W+", "-", row.name) + ".json")


def known(row: Row) -> dict[str, str]:
    """What was measured of a row: here, or, in a fresh clone, what the page says."""
    if record_of(row).exists():
        return dict(json.loads(record_of(row).read_text()))
    for line in PAGE.read_text().splitlines() if PAGE.exists() else []:
        name, *cells = (c.strip() for c in line.strip("|").split(" | "))
        if name == row.name and len(cells) == len(CELLS):
            return dict(zip(CELLS, cells, strict=True))
    return {}


def make_page() -> str:
    lines = [f"| engine | {' | '.join(CELLS)} |", "|---" * (1 + len(CELLS)) + "|"]
    rows = [(row.name, known(row)) for row in ROWS]
    lines += [f"| {name} | {' | '.join(found[c] for c in CELLS)} |" for name, found in rows if found]
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
