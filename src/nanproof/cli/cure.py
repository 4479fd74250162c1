"""``nanproof cure``: the smallest change that brings a dying run back to learning, tried and proved."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..text import plain, show
from .shell import Screen, fail, verb

if TYPE_CHECKING:
    from rich.table import Table

    from ..cure.command import Command
    from ..cure.outcome import Line, Outcome
    from ..errors import UsageError


@verb(example="nanproof cure --budget 15m -- python train.py --config c.yaml")
@click.option("--budget", default="15m", show_default=True, metavar="TIME", help="How long to search: 90s, 15m, 2h.")
@click.option("--jobs", type=click.IntRange(1), help="Trials at a time. Default: one for each core, or for each GPU.")
@click.option("--metric", metavar="NAME", default="", help="Name of the metric, as the program prints it.")
@click.option("--chance", type=float, help="Value of the metric at chance level.")
@click.option("--target", type=float, help="Value of the metric in a healthy run.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for trials. Default: runs/cure-NAME-ID.")
@click.option("--apply", is_flag=True, help="Apply the cure to your files; --undo reverts it.")
@click.option("--undo", is_flag=True, help="Revert the last applied cure.")
@click.option("--ray", metavar="ADDRESS", help="Run trials on this Ray cluster; `local` starts one.")
@click.option("--launcher", metavar="COMMAND", default="", help='Prefix of every trial: "srun -n1 --gpus=1".')
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RUN | -- COMMAND]")
def command(
    screen: Screen,
    budget: str,
    jobs: int | None,
    metric: str,
    chance: float | None,
    target: float | None,
    out: Path | None,
    apply: bool,
    undo: bool,
    ray: str | None,
    launcher: str,
    words: tuple[str, ...],
) -> int:
    """Find a cure for a training command that dies, or for a RUN that `nanproof run` has recorded.

    The original is run until it breaks; then candidates are tried in scratch copies of your project, the best of them
    to their end, the smallest that learns on three seeds. Your files are not touched. A search that was interrupted
    resumes when the same command is typed again, unless your code has changed since.
    """
    from .. import journal
    from ..cure.metric import Wanted
    from ..cure.pool import open_pool
    from ..cure.search import Plan, Search
    from ..cure.surface import read_surface
    from ..errors import UsageError

    if undo:
        paths = journal.undo(journal.home_of(Path.cwd()))
        screen.data({"undone": [str(p) for p in paths]})
        screen.result(f"undone: {', '.join(plain(str(p)) for p in paths)}")
        return 0
    typed, project = _command(words)
    script = typed.script(project)
    if script is None:
        raise UsageError(f"no such program: {typed.target}", hint="run it in the folder where you train")
    count = jobs or _jobs()
    folder = (out or Path("runs") / f"cure-{typed.name}-{_id(typed, project)}").absolute()
    plan = Plan(
        out=folder,
        budget=_seconds(budget),
        wanted=Wanted(name=metric, chance=chance, target=target),
        launcher=tuple(shlex.split(launcher)),
        threads=max(1, (os.cpu_count() or 1) // count),
    )

    def tell(text: str) -> None:
        if not screen.quiet and not screen.as_json:
            show(text, err=True)

    from ..files import Lock, make_folder

    surface = read_surface(typed, project)
    imports = surface.imports() if not launcher else ()  # what a launcher starts imports for itself
    with Lock(make_folder(folder)), open_pool(count, ray, imports) as pool:
        search = Search(surface, plan, pool, tell)
        try:
            outcome = search.run()
        except KeyboardInterrupt:
            fail("interrupted", "the same command goes on from the trials that have ended", code=130)
        outcome, refused, how = _finish(search, outcome, folder, apply)
    screen.data(outcome)
    _show(screen, outcome, folder, how)
    if refused is not None:
        raise refused
    return 0 if outcome.answer == "cured" else 1


def _command(words: tuple[str, ...]) -> tuple[Command, Path]:
    from ..cure.command import read_command, read_run

    if len(words) == 1 and (Path(words[0]).is_dir() or (Path(words[0]).suffix == "" and os.sep in words[0])):
        return read_run(Path(words[0]))
    return read_command(words), Path.cwd()


def _finish(search: object, outcome: Outcome, folder: Path, apply: bool) -> tuple[Outcome, UsageError | None, str]:
    """Write down what was found; make the change if asked for, or return why it cannot be made; and how to make it."""
    import dataclasses
    import json

    from ..cure import remedy
    from ..cure.page import write_page
    from ..cure.search import Search
    from ..errors import UsageError
    from ..files import write_atomic
    from ..records import to_json

    assert isinstance(search, Search)
    line, refused, how = outcome.line, None, ""
    if line is not None and not outcome.healthy:
        change = line.change
        found = remedy.remedy_of(change, search.surface)
        diff = found.diff  # before the files are changed
        written = remedy.write_beside(change, search.surface, folder) if outcome.answer == "cured" else ()
        applied: tuple[Path, ...] = ()
        try:
            if apply and outcome.answer != "cured":
                raise UsageError("nothing was applied: only a cure is", hint=f"look at {_relative(folder)}")
            applied = remedy.apply(change, search.surface) if apply else ()
            how = "the change is made; to revert it: nanproof cure --undo" if apply else ""
        except UsageError as error:
            refused = error
        if diff and not applied:
            whole = remedy.is_in_files(change, search.surface)
            again = shlex.join(["nanproof", "cure", "--apply", *sys.argv[2:]])
            how = f"make it: {again if whole else f'patch -p0 < {_relative(folder / remedy.DIFF)}'}"
        outcome = dataclasses.replace(
            outcome, remedy=found.command, diff=diff, written=tuple(map(str, (*written, *applied)))
        )
    outcome = dataclasses.replace(outcome, report=str(write_page(outcome, folder)))
    write_atomic(folder / "cure.json", json.dumps(to_json(outcome), indent=1) + "\n")
    return outcome, refused, how


def _show(screen: Screen, outcome: Outcome, folder: Path, how: str) -> None:
    screen.result(_table(outcome))
    screen.result(outcome.told)
    if outcome.cures[1:]:
        screen.note(f"also cured by: {', '.join(n for n in outcome.cures if n != outcome.winner)}")
    if outcome.answer == "cured" and not outcome.healthy:
        if outcome.diff:
            screen.result(f"\n{outcome.diff.rstrip()}")
        screen.result(f"\n{how}\nrun it: {outcome.remedy}".replace("\n\n", "\n"))
    for path in outcome.written:
        screen.note(f"wrote {_relative(Path(path))}")
    minutes = f"{outcome.seconds / 60:.1f} minutes" if outcome.seconds > 90 else f"{outcome.seconds:.0f} s"
    screen.note(f"{outcome.trials} trials in {minutes}; all curves: {_relative(Path(outcome.report or folder))}")


def _relative(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _table(outcome: Outcome) -> Table:
    import math

    from rich import box
    from rich.table import Table

    metric = next((m.name for line in outcome.lines for m in line.metrics), "metric")
    table = Table("change", "died at", "loss", metric, "cost", "verdict", "why", box=box.SIMPLE_HEAD, pad_edge=False)
    for line in outcome.lines:
        table.add_row(
            plain(line.change.name),
            str(line.died_at or "–"),
            f"{line.loss:.3g}" if math.isfinite(line.loss) else "–",
            line.values or "–",
            _cost(line),
            line.standing,
            plain(line.why if line.standing != "cured" else line.change.why),
        )
    return table


def _cost(line: Line) -> str:
    if line.cost == line.cost:
        return f"{line.cost:.2f} ×"
    return f"{1000 * line.step_seconds:.3g} ms" if line.step_seconds > 0 else "–"


def _seconds(text: str) -> float:
    from ..errors import UsageError

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    if not found or float(found[1]) <= 0:
        raise UsageError(f"--budget {text} is not a duration", hint="write 90s, 15m or 2h")
    return float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, None: 60}[found[2]]


def _jobs() -> int:
    """One for each GPU that this process may see, else one for each core."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return max(1, len(visible.split(",")))
    if Path("/proc/driver/nvidia/gpus").is_dir():
        return max(1, len(list(Path("/proc/driver/nvidia/gpus").iterdir())))
    return max(1, min(len(os.sched_getaffinity(0)), 8))


def _id(command: Command, project: Path) -> str:
    """An ID that is the same for the same command, folder and code, so that it resumes."""
    import hashlib

    from ..cure.scratch import fingerprint

    return hashlib.sha256(f"{project} {command.shown} {fingerprint(project)}".encode()).hexdigest()[:6]
