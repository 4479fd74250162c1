"""``nanproof run``: a training script, as it is, under the guard."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .shell import Screen, verb

if TYPE_CHECKING:
    from ..run.launcher import Outcome


@verb(example="nanproof run --max-norm 1.0 train.py --lr 3e-4")
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as with python -m.")
@click.option(
    "--policy", type=click.Choice(["default", "strict", "observe"]), default="default", show_default=True,
    help="Skip and recover; stop at the first bad step; or only record.",
)  # fmt: skip
@click.option("--max-norm", type=float, help="Clip gradients to this norm, besides what the script does.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where log and incidents go. Default: runs/NAME-TIME.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="For example policy.max_consecutive=3.")
@click.option("--nproc", type=click.IntRange(1), help="Let torchrun start that many processes on this machine.")
@click.option("--nnodes", type=click.IntRange(1), default=1, help="On that many machines; call it on each of them.")
@click.option("--rdzv", metavar="HOST:PORT", help="Where the machines meet.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    screen: Screen,
    is_module: bool,
    policy: str,
    max_norm: float | None,
    run_dir: Path | None,
    settings: tuple[str, ...],
    nproc: int | None,
    nnodes: int,
    rdzv: str | None,
    program: str,
    arguments: tuple[str, ...],
) -> int:
    """Run a training script unmodified under the guard; - reads it from standard input.

    Bad steps are undone before the optimizer takes them, poisoned checkpoints are not written, and every incident is
    kept with its batch and its place. The script's own exit code is passed on; 66 says that the guard stopped it.
    """
    from ..errors import UsageError
    from ..run.launcher import run_program
    from ..run.options import Options, choose_run_dir, read_settings
    from ..run.program import Program
    from ..run.voice import speak

    target = Program(target=program, arguments=arguments, is_module=is_module)
    target.check()
    changes, guard = read_settings([*settings, *([f"max_norm={max_norm}"] if max_norm is not None else [])])
    chosen = run_dir or choose_run_dir(target.name)
    options = Options(
        run_dir=chosen, run_dir_given=run_dir is not None, policy=policy, policy_changes=changes, guard=guard
    )
    options.check()
    if nproc is None and nnodes > 1:
        raise UsageError("--nnodes needs --nproc", hint="say how many processes each machine has: --nproc 8")
    first = int(os.environ.get("RANK", "0")) == 0
    if first and nproc is None and not screen.quiet:
        click.echo(f"nanproof: records go to {chosen}", err=True)
    if nproc is not None:
        from ..run.torchrun import launch, torchrun_command

        words = [
            *(["--quiet"] if screen.quiet else []), f"--policy={policy}", f"--run-dir={chosen}",
            *(f"--set={s}" for s in settings), *([f"--max-norm={max_norm}"] if max_norm is not None else []),
            *(["-m"] if is_module else []), program, *arguments,
        ]  # fmt: skip
        return launch(torchrun_command(words, nproc=nproc, nnodes=nnodes, rendezvous=rdzv), chosen)

    def report(outcome: Outcome) -> None:
        sys.stdout.flush()
        if first:
            _tell(screen, outcome)

    with speak(quiet=screen.quiet):
        return run_program(target, options, report=report).exit_code


command.allow_interspersed_args = False  # what comes after the program is its own


def _tell(screen: Screen, outcome: Outcome) -> None:
    screen.data(outcome)
    for what, why in outcome.not_guarded.items():
        click.echo(f"nanproof: not guarded: {what}: {why}", err=True)
    if outcome.run_dir is not None and not screen.quiet:
        click.echo(f"nanproof: records are in {outcome.run_dir}", err=True)
