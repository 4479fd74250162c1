"""A first plan for a project."""

from __future__ import annotations

import shlex
from pathlib import Path

from ...errors import UsageError
from ...files import file_text
from .script import read_script

_SCRIPTS = ("train.py", "main.py", "run.py", "src/train.py", "scripts/train.py", "tools/train.py")


def first_plan(folder: Path, script: str | None = None, processes: int = 2) -> str:
    """The text of a plan: one process briefly, one for longer and, if the script can, two and as many as given."""
    script = script or next((s for s in _SCRIPTS if (folder / s).is_file()), None)
    if script is None:
        raise UsageError(f"no training script was found in {folder}", hint="name it: nanproof rollout --init train.py")
    try:
        text = file_text(folder / script, errors="replace")
    except OSError as error:
        raise UsageError(f"{script} cannot be read: {error.strerror}", hint="name the training script") from None
    found = read_script(text, folder / script)
    name = Path(script).name
    counts = sorted({1, min(2, processes), processes}) if found.parallel and not found.spawns else [1]
    stages = [("smoke", 1, 100, 10), *((f"1 × {n}", n, 1000, 60) for n in counts)]
    lines = [
        f"# A rollout of {script}: each stage must pass its gates before the next one starts.",
        "# {run_dir} is the stage's own folder. Run it with: nanproof rollout plan.yaml",
    ]
    if found.spawns:
        lines.append(f"# {name} starts its own processes: say in each command how many.")
    elif not found.parallel and processes > 1:
        lines.append(f"# One process: {name} sets up no data parallelism (DDP, FSDP, a trainer).")
    if found.key is None:
        own = f" (its own is {found.rate:g})" if found.rate is not None else ""
        lines.append(f"# Nothing is tried again: {name} takes no learning rate on its command line{own}.")
    elif found.rate is None:
        lines.append(f"# Add to a stage: on_fail: {{set: {{{found.key}: HALF_OF_YOURS}}, retry: 1}}")
    lines += [
        f"name: {Path(script).stem}",
        f"overrides: {found.style}   # how set: reaches the script: dotted is key=value, flags is --key value",
        "stages:",
    ]
    for stage, count, steps, minutes in stages:
        many = f"--nproc {count} " if count > 1 or (found.joins and not found.spawns) else ""
        lines += [
            f"  - name: {stage}",
            f"    command: nanproof run --run-dir {{run_dir}} {many}{shlex.quote(script)}",
            f"    steps: {steps}          # the stage ends after this many",
            f"    minutes: {minutes}         # or after this long",
            "    gates:",
            "      incidents: 0",
            "      loss: falling",
            "      grad_norm: [1.0e-6, 100]",
        ]
        if stage != "smoke" and found.key is not None and found.rate is not None:
            slower = f"{{set: {{{found.key}: {found.rate / 2:.3g}}}, retry: 1}}"
            lines.append(f"    on_fail: {slower}   # half of the script's own {found.rate:g}")
    return "\n".join(lines) + "\n"
