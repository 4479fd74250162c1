"""What the training programs share: their command line, and how they begin and end.

python -m nanproof.cases.restran_mhc.train --config-name stable --seed 1 --steps 60 optimizer.lr=1e-2
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import NonFiniteError, UsageError
from .ranks import Ranks, launch_again
from .settings import Settings, config_names, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run, as it was asked for."""

    case: str
    config: str
    cfg: Settings
    seed: int
    steps: int
    """Where to stop; the schedule is as long as the config says."""
    device: torch.device
    out: Path
    resume: Path | None
    ranks: Ranks


def run_program(case: str, folder: Path, train: Callable[[Job], None], flags: Mapping[str, str] | None = None) -> None:
    """Read the command line, train, and end with one sentence instead of a traceback when it cannot go on."""
    try:
        job = _read_job(case, folder, sys.argv[1:], flags or {})
        train(job)
        job.ranks.leave()
    except (UsageError, NonFiniteError) as error:
        print(f"error: {error.message}", *([f"  hint: {error.hint}"] if error.hint else []), sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)


def _read_job(case: str, folder: Path, words: Sequence[str], flags: Mapping[str, str]) -> Job:
    configs = folder / "configs"
    parser = argparse.ArgumentParser(prog=f"python -m nanproof.cases.{folder.name}.train", allow_abbrev=False)
    parser.add_argument("--config-name", default="original", metavar="NAME", help=", ".join(config_names(configs)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="stop after this many steps of the schedule")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="folder of this run; by default in runs/")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a folder of them")
    for flag, key in flags.items():
        parser.add_argument(flag, metavar="VALUE", help=f"the same as {key}=VALUE")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example optimizer.lr=5e-3")
    given = parser.parse_intermixed_args(words)
    named = vars(given)
    short = [
        f"{key}={value}" for flag, key in flags.items() if (value := named[flag[2:].replace("-", "_")]) is not None
    ]
    cfg = load(configs, given.config_name, [*short, *given.overrides], os.environ)
    launch_again(cfg.launch)
    if given.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here", hint="leave --device cuda out")
    torch.manual_seed(given.seed)
    if given.device == "cpu":
        torch.set_num_threads(1)  # the tensors are tiny, and results must not depend on the number of cores
    steps = cfg.training.steps if given.steps is None else given.steps
    if not 1 <= steps <= cfg.training.steps:
        raise UsageError(
            f"--steps {steps}: the schedule has steps 1 to {cfg.training.steps}",
            hint=f"for a longer run give training.steps={max(steps, 1)}",
        )
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if given.device == "cuda" else "cpu")
    return Job(
        case=case,
        config=given.config_name,
        cfg=cfg,
        seed=given.seed,
        steps=steps,
        device=device,
        out=given.out or Path("runs") / f"{case}-{given.config_name}-{given.seed}",
        resume=given.resume,
        ranks=Ranks(device),
    )
