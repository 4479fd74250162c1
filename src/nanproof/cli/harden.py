"""``nanproof harden``: a stable variant of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .shell import Screen, verb

if TYPE_CHECKING:
    from ..config.hardening import Change, Hardening
    from ..config.value import Plain


@verb(example="nanproof harden configs/train.yaml --set lr=5e-5 --fact cause=lr-too-high --diff")
@click.argument("config", type=click.Path())
@click.option("-o", "--out", metavar="OUT", help="Output file. Default: NAME_stable beside the original.")
@click.option("--set", "changes", metavar="KEY=VALUE", multiple=True, help="Set this, whatever the evidence says.")
@click.option("--fact", "facts", metavar="NAME=VALUE", multiple=True, help="A known fact about the run: gpu=A100.")
@click.option("--diff", is_flag=True, help="Only print the diff; exit 1 if there is one.")
@click.option("--apply", is_flag=True, help="Change the original in place; --undo reverts it.")
@click.option("--undo", is_flag=True, help="Revert the last hardening of CONFIG.")
@click.option("--conservative", is_flag=True, help="Also apply what often helps: lr/2, warm-up x2, clip, accumulate.")
@click.option("--escalate", type=click.IntRange(1, 5), metavar="N", help="Stronger measures, from 1 to 5; 4 is fp32.")
@click.option(
    "--project", metavar="DIR", type=click.Path(), help="Folder of the code. Default: the project around CONFIG."
)
def command(
    screen: Screen,
    config: str,
    out: str | None,
    changes: tuple[str, ...],
    facts: tuple[str, ...],
    diff: bool,
    apply: bool,
    undo: bool,
    conservative: bool,
    escalate: int | None,
    project: str | None,
) -> int:
    """Write a stable variant of CONFIG (YAML, JSON, TOML, Python or .sh), every change with its reason.

    Changes rest on evidence: what the config checks find, and facts given with --fact or by nanproof diagnose. What
    has no evidence is left alone, unless --conservative. Comments and layout are kept; the original is not touched.
    """
    from ..config.evidence import Fact
    from ..config.hardening import harden
    from ..config.hardening import undo as take_back
    from ..config.project import Project
    from ..errors import UsageError

    if undo:
        restored = [str(p) for p in take_back(config)]
        screen.data({"undone": restored})
        screen.result(f"undone: {', '.join(map(_plain, restored))}")
        return 0
    if apply and out:
        raise UsageError("--apply changes the original, -o writes another file", hint="give one of them")
    known = [Fact(name=name, value=value, source="--fact") for name, value in map(_fact, facts)]
    result = harden(
        config,
        set=changes,
        facts=known,
        project=Project.read(project) if project else None,
        conservative=conservative,
        escalate=escalate,
    )
    target = None
    if result.changes and not diff:
        target = result.apply() if apply else result.save(out)
    screen.data(
        {
            "path": config,
            "written": str(target) if target else None,
            "changes": result.changes,
            "left": result.left,
            "next": result.next,
            "diff": result.diff,
        }
    )
    if diff:
        screen.result(_plain(result.diff, "\n\t").rstrip("\n") or "no difference")
        return int(bool(result.changes))
    _show(screen, result, str(target) if target else None, bool(conservative or escalate))
    return 0


def _fact(word: str) -> tuple[str, Plain]:
    from ..config.overrides import plain
    from ..errors import UsageError

    name, equals, value = word.partition("=")
    if not equals:
        raise UsageError(f"{word!r} is not a fact", hint="write name=value: --fact gpu=A100")
    return name.strip(), plain(value.strip())


def _show(screen: Screen, result: Hardening, target: str | None, ladder: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    if result.changes:
        table = Table(box=None, pad_edge=False)
        for title in ("setting", "before", "after", "why"):
            table.add_column(title, overflow="fold")
        for change in result.changes:
            table.add_row(*(Text(_plain(cell)) for cell in _cells(change)))
        screen.result(table)
    else:
        more = "" if ladder else "; --conservative changes what often helps anyway, --fact adds what you know"
        screen.result(f"nothing to change: nothing here has evidence against it{more}")
    for left in result.left:
        tag = f"{left.mark}: " if left.mark else ""
        screen.result(f"left alone  {_plain(left.what)}: {tag}{_plain(left.why)}")
    for step in result.next:
        screen.note(f"next: {_plain(step)}")
    if target is not None:
        screen.result(f"wrote {_plain(target)}")
        screen.note(f"take it back: nanproof harden {_plain(result.path)} --undo")


def _cells(change: Change) -> tuple[str, str, str, str]:
    from ..config.value import show

    default = f" (default {show(change.default)})" if change.default is not None else ""
    before = show(change.before) if change.before is not None else f"not set{default}"
    why = change.why + "".join(f"\n{e}" for e in change.evidence)
    if change.mark:
        why += f"\n{change.mark}: {change.remark}"
    return change.key, before, show(change.after), why


def _plain(text: str, keep: str = "\n") -> str:
    """Names come out of files: control characters must not reach the terminal."""
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)
