"""A first plan for a project."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import UsageError

_SCRIPTS = ("train.py", "main.py", "run.py", "src/train.py", "scripts/train.py", "tools/train.py")


# how a script takes a learning rate: as --lr 1e-4 (argparse, click, typer …), or as lr=1e-4 (Hydra, OmegaConf)
_FLAG = re.compile(r"""["']--((?:learning[-_]rate|lr))["']""")
_DOTTED = re.compile(r"\bhydra\b|OmegaConf\.from_(?:cli|dotlist)")


def first_plan(folder: Path, script: str | None = None, processes: int = 2) -> str:
    """The text of a plan: one process briefly, one for longer and, if the script can, two and as many as given."""
    script = script or next((s for s in _SCRIPTS if (folder / s).is_file()), None)
    if script is None:
        raise UsageError(f"no training script was found in {folder}", hint="name it: nanproof rollout --init train.py")
    style, rate = _overrides(folder / script)
    alone = not _is_parallel(folder / script)
    counts = [1] if alone else sorted({1, min(2, processes), processes})
    stages = [("smoke", 1, 100, 10), *((f"1 × {n}", n, 1000, 60) for n in counts)]
    lines = [
        f"# A rollout of {script}: each stage must pass its gates before the next one starts.",
        "# {run_dir} is the stage's own folder. Run it with: nanproof rollout plan.yaml",
        f"name: {Path(script).stem}",
        f"overrides: {style}   # how set: reaches the script: dotted is key=value, flags is --key value",
        "stages:",
    ]
    if alone and processes > 1:
        lines.insert(2, f"# One process: {Path(script).name} sets up no data parallelism (DDP, FSDP, a trainer).")
    for name, count, steps, minutes in stages:
        lines += [
            f"  - name: {name}",
            f"    command: nanproof run --run-dir {{run_dir}} --nproc {count} {script}"
            if count > 1
            else f"    command: nanproof run --run-dir {{run_dir}} {script}",
            f"    steps: {steps}          # the stage ends after this many",
            f"    minutes: {minutes}         # or after this long",
            "    gates:",
            "      incidents: 0",
            "      loss: falling",
            "      grad_norm: [1.0e-6, 100]",
        ]
        if name != "smoke" and rate is not None:
            lines += [
                f"    on_fail: {{set: {{{rate}: {_slower(folder / script)}}}, retry: 1}}   # half of the script's own"
            ]
        elif name != "smoke":
            lines += ["    # on_fail: {set: {lr: 5.0e-5}, retry: 1}   # if the script takes a learning rate"]
    return "\n".join(lines) + "\n"


def _overrides(script: Path) -> tuple[str, str | None]:
    """How a script takes settings, and what it calls its learning rate, if that can be seen in its text."""
    text = _text_of(script)
    flag = _FLAG.search(text)
    if flag is not None:
        return "flags", flag[1]
    return "dotted", "optimizer.lr" if _DOTTED.search(text) else None


_PARALLEL = re.compile(
    r"DistributedDataParallel|\bDDP\b|fully_shard|FullyShardedDataParallel|init_process_group|\bAccelerator\b"
    r"|\bTrainer\b|lightning|deepspeed|\bFabric\b|LOCAL_RANK|init_device_mesh"
)
_RATE = re.compile(r"""(?:\blr|learning_rate)["']?\s*(?:=|:|,[^\n]{0,60}?default\s*=)\s*([0-9][0-9._eE+-]*)""")


def _text_of(script: Path) -> str:
    return script.read_text(encoding="utf-8", errors="replace") if script.is_file() else ""


def _is_parallel(script: Path) -> bool:
    """Whether a script can train in several processes that share an update, as far as its text tells."""
    return bool(_PARALLEL.search(_text_of(script)))


def _slower(script: Path) -> str:
    """Half of the learning rate that the script names itself; a usual small one where it names none."""
    found = _RATE.search(_text_of(script))
    try:
        return f"{float(found[1]) / 2:.3g}" if found else "5.0e-5"
    except ValueError:
        return "5.0e-5"
