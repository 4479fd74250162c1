"""``nanproof locate``: the line that broke a step."""

from __future__ import annotations

import click

from .shell import Screen, verb


@verb(example="nanproof locate runs/a/incidents/000123 --step train.py:make_step")
@click.argument("incident", type=click.Path())
@click.option("--step", metavar="FILE:FUNCTION", help="make_step(batch) -> (model, step_fn): play the incident again.")
@click.option("--fp32", "precision", flag_value="float32", help="Play it in float32: does precision alone explain it?")
@click.option("--fp64", "precision", flag_value="float64", help="The same in float64.")
@click.option("--verify", is_flag=True, help="After a change of the code: is the incident gone? Exit 0 if it is.")
def command(screen: Screen, incident: str, step: str | None, precision: str | None, verify: bool) -> int:
    """Show where the step of an incident broke, or play it again with your own code.

    Without --step, prints what the guarded run found by itself.
    """
    if step is None:
        return _stored(screen, incident)
    from ..locating.again import load_factory, play_again

    found = play_again(incident, load_factory(step), precision)
    screen.data(found)
    if verify and not found.reproduced:
        screen.result("the incident is gone: the same batch, weights and random states give a finite step")
    else:
        screen.result(str(found))
    return int(found.reproduced)


def _stored(screen: Screen, incident: str) -> int:
    import json
    from pathlib import Path

    from ..errors import UsageError
    from ..records import Incident

    record = Path(incident) / "incident.json"
    if not record.is_file():
        raise UsageError(f"{incident} is no incident", hint="give a folder below run_dir/incidents")
    kept = Incident.from_json(json.loads(record.read_text()))
    if kept.location is None:
        raise UsageError(f"{incident} was not located when it happened", hint="play it again with --step FILE:FUNCTION")
    screen.data(kept.location)
    place = kept.location
    screen.result(f"{kept.verdict} → {kept.action.kind}")
    screen.result(f"{place['file']}:{place['line']} in {place['function']}: {place['op']}, {place['mechanism']}")
    screen.result(f"  {place['why']}")
    return 1
