"""``nanproof run``: a training script, as it is, under the guard."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..launch import is_first_process
from ..text import show
from .shell import Screen, verb

if TYPE_CHECKING:
    from ..run.launcher import Outcome


@verb(example="nanproof run --max-norm 1.0 train.py --lr 3e-4")
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as with python -m.")
@click.option(
    "--policy",
    type=click.Choice(["default", "strict", "observe"]),
    default="default",
    show_default=True,
    help="Skip and recover; stop at the first bad step; or only record.",
)
@click.option("--max-norm", type=float, help="Clip gradients to this norm, in addition to the script.")
@click.option(
    "--heal/--no-heal",
    default=None,
    help="Apply repairs that replay has proved, such as a module in float32. Default: only offer them.",
)
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Folder for log and incidents. Default: runs/NAME-TIME."
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set an option: policy.max_consecutive=3.")
@click.option("--require", is_flag=True, help="Exit with 2 as soon as training is not guarded, instead of warning.")
@click.option("--check", "only_check", is_flag=True, help="Run until the first guarded step; exit 1 if none.")
@click.option("--nproc", type=click.IntRange(1), help="Start this many processes on this machine with torchrun.")
@click.option("--nnodes", type=click.IntRange(1), default=1, help="Number of machines; run this command on each.")
@click.option("--rdzv", metavar="HOST:PORT", help="Rendezvous address of the machines.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    screen: Screen,
    is_module: bool,
    policy: str,
    max_norm: float | None,
    heal: bool | None,
    run_dir: Path | None,
    settings: tuple[str, ...],
    require: bool,
    only_check: bool,
    nproc: int | None,
    nnodes: int,
    rdzv: str | None,
    program: str,
    arguments: tuple[str, ...],
) -> int:
    """Run a training script, or a command that starts one, unmodified under the guard; - reads a script from stdin.

    Bad steps are undone before they reach the weights, non-finite checkpoints are not written, and every incident is
    recorded with its batch and source line. The exit code is the script's own, or 66 when the guard stopped the run.
    """
    from ..errors import GuardStop, UsageError
    from ..run.command import Command, read_typed, run_command, was_stopped
    from ..run.console import show_messages
    from ..run.launcher import run_program
    from ..run.options import Options, choose_run_dir, read_settings
    from ..run.program import Program

    if is_module or program == "-":
        typed: Program | Command = Program(target=program, arguments=arguments, is_module=is_module)
    else:
        typed = read_typed(program, arguments)
    if isinstance(typed, Program):
        typed.check()
    given = [f"max_norm={max_norm}"] if max_norm is not None else []
    given += [f"heal={'open' if heal else 'off'}"] if heal is not None else []
    changes, guard = read_settings([*settings, *given])
    chosen = run_dir or choose_run_dir(typed.name)
    options = Options(
        run_dir=chosen,
        run_dir_given=run_dir is not None,
        policy=policy,
        policy_changes=changes,
        guard=guard,
        require=require,
        until_guarded=only_check,
    )
    options.check()
    if nproc is None and nnodes > 1:
        raise UsageError("--nnodes needs --nproc", hint="say how many processes each machine has: --nproc 8")
    first = is_first_process()
    if nproc is not None:
        if isinstance(typed, Command):
            raise UsageError(f"--nproc starts Python scripts, and {program} is none", hint="leave --nproc out")
        from ..run.torchrun import launch, torchrun_command

        words = [
            *(["--quiet"] if screen.quiet else []),
            f"--policy={policy}",
            f"--run-dir={chosen}",
            *(["--require"] if require else []),
            *(["--check"] if only_check else []),
            *(f"--set={s}" for s in settings),
            *(f"--set={s}" for s in given),
            *(["-m"] if typed.is_module else []),
            typed.target,
            *typed.arguments,
        ]
        return launch(torchrun_command(words, nproc=nproc, nnodes=nnodes, rendezvous=rdzv), chosen)

    out, err = sys.stdout, sys.stderr

    def report(outcome: Outcome) -> None:
        sys.stdout.flush()
        if first:  # also where the script has replaced its streams
            with redirect_stdout(sys.stdout if out.closed else out), redirect_stderr(sys.stderr if err.closed else err):
                _tell(screen, outcome)

    with show_messages(quiet=screen.quiet):
        if isinstance(typed, Command):
            outcome = run_command(typed, options, report=report)
            if outcome.exit_code and was_stopped(outcome):
                return GuardStop.exit_code
        else:
            outcome = run_program(typed, options, report=report)
    if only_check and outcome.exit_code == 0:
        return 0 if outcome.attached else 1
    return 2 if require and not outcome.attached and outcome.exit_code == 0 else outcome.exit_code or 0


command.allow_interspersed_args = False  # what comes after the program is its own


def _tell(screen: Screen, outcome: Outcome) -> None:
    from ..run.handover import hand_over

    screen.data(outcome)
    clean = outcome.state == "finished" and outcome.attached and not outcome.not_guarded
    if not (screen.quiet and clean):
        for line in hand_over(outcome):
            show(line, err=True)
