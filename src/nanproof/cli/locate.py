"""``nanproof locate``: the line that broke a step."""

from __future__ import annotations

from pathlib import Path

import click

from .shell import Screen, verb


@verb(example="nanproof locate runs/a --step train.py:make_step")
@click.argument("incident", metavar="INCIDENT|RUN", type=click.Path())
@click.option("--step", metavar="FILE:FUNCTION", help="make_step(batch) -> (model, step_fn): replay the incident.")
@click.option("--fp32", "precision", flag_value="float32", help="Replay in float32: does precision alone explain it?")
@click.option("--fp64", "precision", flag_value="float64", help="The same in float64.")
@click.option("--verify", is_flag=True, help="After a code change: is the incident gone? Exit 0 if so.")
def command(screen: Screen, incident: str, step: str | None, precision: str | None, verify: bool) -> int:
    """Show where the step of an incident broke, or replay it with your own code.

    Of a run's folder the first incident is shown. Without --step, prints what the guarded run found by itself.
    """
    from ..errors import UsageError

    if step is None and (precision or verify):
        raise UsageError("--fp32, --fp64 and --verify replay the step", hint="say how with --step FILE:FUNCTION")
    if step is None:
        return _stored(screen, incident)
    from ..locating.incidents import find_incident
    from .progress import working

    with working(screen, f"loading {step}"):
        from ..locating.again import load_factory, play_again  # torch alone may take seconds

        factory = load_factory(step)
    folder, remark = find_incident(Path(incident))
    if remark:
        screen.note(remark)
    with working(screen, "reading the incident") as progress:
        found = play_again(folder, factory, precision, progress)
    screen.data(found)
    if verify and not found.reproduced:
        screen.result("the incident is gone: the same batch, weights and random states give a finite step")
    else:
        screen.result(str(found))
    return int(found.reproduced)


def _stored(screen: Screen, incident: str) -> int:
    from ..errors import UsageError
    from ..locating.incidents import find_incident, read_record

    folder, remark = find_incident(Path(incident))
    if remark:
        screen.note(remark)
    kept = read_record(folder)
    if kept.location is None:
        raise UsageError(f"{folder} was not located when it happened", hint="replay it with --step FILE:FUNCTION")
    screen.data(kept.location)
    screen.result(f"{kept.verdict} → {kept.action.kind}")
    screen.result(str(kept.location))
    return 1
