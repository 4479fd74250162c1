"""``nanproof watch``: see it happen."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import click

from .shell import Screen, verb

if TYPE_CHECKING:
    from ..watch.glance import Glance
    from ..watch.runs import Finder, Run


@verb(example="nanproof watch runs/a runs/b", inert=True)
@click.argument("runs", nargs=-1, metavar="RUN_OR_LOG...")
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@click.option("--notify", is_flag=True, help="Send alerts to NANPROOF_WEBHOOK, NANPROOF_ALERTS.")
@click.option("--web", is_flag=True, help="Serve a page for the browser instead.")
@click.option("--host", default="127.0.0.1", show_default=True, help="With --web: address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="With --web: port. Default: any free port.")
@click.option("--open", "browser", is_flag=True, help="With --web: open the page in the browser of this machine.")
def command(
    screen: Screen, runs: tuple[str, ...], once: bool, notify: bool, web: bool, host: str, port: int, browser: bool
) -> int:
    """Watch runs, or logs of any known format, while they grow; q quits.

    The page of --web is served to this machine only, under an address that holds a random token.
    """
    from ..errors import UsageError
    from ..watch.runs import Finder
    from .progress import working

    if notify and (web or screen.as_json):
        other = "--web" if web else "--json"
        raise UsageError(f"{other} sends no alerts", hint="start nanproof watch --notify beside it")

    with working(screen, "looking for runs"):
        found = Finder(runs)
    if web:
        return _serve(screen, found, host, port, browser)
    hear = _Telling() if notify else None
    if screen.as_json:
        from ..watch.glance import glance

        for run in found.runs:
            run.poll()
        screen.data([glance(r.name, r.series, r.incidents(), r.state(), r.outlook) for r in found.runs])
        return 0
    from ..watch.tui import watch

    try:
        watch(found, once=once, hear=hear)
    finally:
        if hear is not None:
            hear.notifier.close()
    if hear is not None and hear.trouble:
        screen.result(hear.trouble)
    return 0


class _Telling:
    """Compares each glance with the one before, and tells what happened between them."""

    def __init__(self) -> None:
        from ..watch.notify import Notifier

        self.notifier = Notifier()
        self._last: dict[str, Glance] = {}

    def __call__(self, run: Run, now: Glance) -> str:
        from ..watch.occasions import occasions

        for occasion, text in occasions(self._last.get(run.id), now):
            self.notifier.tell(run.name, occasion, text)
        self._last[run.id] = now
        return self.trouble

    @property
    def trouble(self) -> str:
        """What the user should know about alerts that did not go out."""
        notifier = self.notifier
        several = notifier.dropped != 1
        count = f"{notifier.dropped} alert{'s were' if several else ' was'} not sent"
        return f"{count}: {notifier.trouble}" if notifier.trouble else ""


def _serve(screen: Screen, found: Finder, host: str, port: int, browser: bool) -> int:
    from ..watch.server import serve

    def ready(address: str) -> None:
        screen.data({"address": address})
        screen.result(address)
        screen.note("press Ctrl+C to end")
        if browser:
            import webbrowser

            webbrowser.open(address)

    with suppress(KeyboardInterrupt):  # the way to end it
        serve(found, host=host, port=port, ready=ready)
    return 0
