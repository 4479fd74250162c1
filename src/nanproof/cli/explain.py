"""``nanproof explain``: what a name means."""

from __future__ import annotations

import click

from .shell import Screen, verb


@verb(example="nanproof explain fp16")
@click.argument("name", required=False)
def command(screen: Screen, name: str | None) -> int:
    """Explain a floating-point format: its limits and what fails at them. Without NAME, compare all formats."""
    from rich.table import Table

    from ..floats import FORMATS, format_of

    chosen = [format_of(name)] if name else list(FORMATS)
    facts = [
        {
            "format": f.name,
            "also called": ", ".join(f.aliases),
            "max": f.max,
            "smallest normal": f.smallest_normal,
            "smallest subnormal": f.smallest_subnormal,
            "machine eps": f.machine_eps,
            "safe eps": f.safe_eps,
            "exp(x) overflows above": f.exp_limit,
            "has Inf": f.inf_code is not None,
            "has NaN": f.specials != "none",
        }
        for f in chosen
    ]
    screen.data(facts if name is None else facts[0])
    if name:
        table = Table(box=None, pad_edge=False, show_header=False)
        for key, value in facts[0].items():
            table.add_row(key, _show(value))
    else:
        keys = [k for k in facts[0] if k not in ("also called", "machine eps")]
        table = Table(*keys, box=None, pad_edge=False)
        for row in facts:
            table.add_row(*(_show(row[k]) for k in keys))
    screen.result(table)
    return 0


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
