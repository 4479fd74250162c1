"""``nanproof watch``: see it happen."""

from __future__ import annotations

import click

from .shell import Screen, verb


@verb(example="nanproof watch --web runs/a runs/b")
@click.argument("runs", nargs=-1, metavar="RUN_OR_LOG...")
@click.option("--web", is_flag=True, help="Serve a page for the browser.")
@click.option("--host", default="127.0.0.1", show_default=True, help="With --web: where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="With --web: a free one unless told.")
@click.option("--open", "browser", is_flag=True, help="With --web: open the page in the browser of this machine.")
def command(screen: Screen, runs: tuple[str, ...], web: bool, host: str, port: int, browser: bool) -> int:
    """Watch runs or logs of any known format while they grow.

    The page is served to this machine only, under an address that holds a random token.
    """
    from ..watch.runs import find_runs

    found = find_runs(runs)
    from ..watch.server import serve

    def ready(address: str) -> None:
        screen.data({"address": address})
        screen.result(address)
        screen.note("press Ctrl+C to end")
        if browser:
            import webbrowser

            webbrowser.open(address)

    serve(found, host=host, port=port, ready=ready)
    return 0
