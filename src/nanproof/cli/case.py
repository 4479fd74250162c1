"""``nanproof case``: four real systems in miniature, that die of their own numerics and are healed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..text import show
from .shell import Screen, verb

if TYPE_CHECKING:
    from rich.table import Table as Grid

    from ..cases import Case
    from ..cases.compare import Table


@verb(example="nanproof case radiodiff --variant original")
@click.argument("name", required=False)
@click.option("--variant", type=click.Choice(["original", "advised", "stable"]), help="Train this variant.")
@click.option("--config-name", metavar="NAME", help="Train with this config; each variant has one of the same name.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting: optimizer.lr=5e-3.")
@click.option("--steps", type=int, help="Stop after this many steps.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Output folder. Default: below runs/.")
@click.option("--story", is_flag=True, help="Run it all: it dies, is diagnosed, guarded, repaired, and trains.")
@click.option("--compare", is_flag=True, help="Train all variants side by side, and try the advice they got.")
@click.option("--page", type=click.Path(path_type=Path), help="With --compare: also write a Markdown page.")
def command(
    screen: Screen,
    name: str | None,
    variant: str | None,
    config_name: str | None,
    overrides: tuple[str, ...],
    steps: int | None,
    seed: int,
    device: str,
    out: Path | None,
    story: bool,
    compare: bool,
    page: Path | None,
) -> int:
    """List the cases, train a variant of one, tell its story, or compare its variants."""
    from ..cases import find, find_all
    from ..errors import UsageError

    if name is None:
        cases = find_all()
        screen.data([{"name": c.name, "title": c.title} for c in cases])
        for known in cases:
            screen.result(f"{known.name:12}  {known.title}", 14)
        screen.note("")
        screen.note("nanproof case NAME --story tells one; --variant original trains it.", 2)
        return 0
    case = find(name)
    if sum([variant is not None or config_name is not None, story, compare]) != 1:
        raise UsageError(
            "choose one of --variant, --story and --compare",
            hint=f"nanproof case {name} --variant original, or --story, or --compare",
        )
    if page is not None and not compare:
        raise UsageError("--page writes what --compare finds", hint="give both")
    if story:
        return _story(screen, case, out, seed)
    if compare:
        return _compare(screen, case, out, seed, page)
    if variant is not None and config_name is not None and variant != config_name:
        raise UsageError("--variant and --config-name name different configs", hint="give one of the two")
    from os import execv

    python, _, *words = case.command(
        config_name or variant or "", seed=seed, steps=steps, device=device, out=out, overrides=overrides
    )
    return execv(python, [python, "-m", "nanproof.cases", *words])  # with its own signals and exit code


def _folder(case: Case, out: Path | None, what: str) -> Path:
    from ..errors import UsageError

    folder = out or Path("runs") / f"{case.name}-{what}"
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", hint="give --out another folder, or remove this one")
    return folder


def _story(screen: Screen, case: Case, out: Path | None, seed: int) -> int:
    from ..cases.story import REPORT, tell_story

    folder = _folder(case, out, "story")
    screen.note(f"{case.name}: {case.title}", 2)
    told = tell_story(case, folder, seed=seed, tell=screen.note)
    screen.data(told)
    ok = all(t.ok for t in told)
    screen.result(f"\n{len(told)} stages, all as they should be: {folder / REPORT}" if ok else "\na stage went wrong")
    return 0 if ok else 1


def _compare(screen: Screen, case: Case, out: Path | None, seed: int, page: Path | None) -> int:
    from ..cases.compare import changes_table, claims_table, compare, variants_table
    from ..cases.page import write_page

    def tell(words: str) -> None:
        if not screen.quiet and not screen.as_json:
            show(f"training {words} …", err=True)

    found = compare(case, _folder(case, out, "compare"), seed=seed, tell=tell)
    screen.data(found)
    for title, table in (
        (f"{case.name}, seed {seed}", variants_table(found.results)),
        ("What its post-mortem recommended, each alone", claims_table(found.judged)),
        ("What the stable variant does differently", changes_table(case)),
    ):
        screen.result(_table(title, table))
    if page is not None:
        write_page(case, found, page)
        screen.note(f"wrote {page}")
    return 0


def _table(title: str, table: Table) -> Grid:
    from rich import box
    from rich.table import Table as Grid

    names, rows = table
    grid = Grid(*names, title=title, title_justify="left", box=box.SIMPLE_HEAD, show_lines=len(names) > 4)
    for row in rows:
        grid.add_row(*row)
    return grid
