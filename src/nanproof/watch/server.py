"""The server behind the page: history as bytes, what is new as a stream of events."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib import resources
from typing import Any, TypeVar, cast

from ..errors import UsageError
from ..records import to_json
from . import history
from .compare import compare
from .limits import limited
from .runs import Finder, Run, state_json
from .security import App, Gatekeeper
from .why import facts_of

EVERY = 0.2  # seconds between two looks at the logs
QUEUE = 64  # messages that a slow viewer may be behind before it is cut off, and comes back by itself
VIEWERS = 32
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
T = TypeVar("T")


def page_file(name: str) -> bytes:
    """A file of the page, as it stands in the package."""
    return resources.files("nanproof.watch").joinpath("page", *name.split("/")).read_bytes()


MODULES = (
    "make.js",
    "source.js",
    "series.js",
    "link.js",
    "export.js",
    "marks.js",
    "chart.js",
    "panel.js",
    "incident.js",
    "layers.js",
    "app.js",
)  # each after what it imports
PAGE = ("index.html", "style.css", *MODULES, "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css")


class Desk:
    """The runs and their viewers. Logs are read in one thread of their own, and only while somebody looks."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder
        self.runs = {run.id: run for run in finder.runs}
        self.viewers: set[asyncio.Queue[str]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanproof-logs")
        self._task: asyncio.Task[None] | None = None
        self._states: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, int] = {}
        self._asked: dict[str, asyncio.Task[dict[str, object]]] = {}

    async def ask(self, function: Callable[..., T], *args: Any) -> T:
        """Do something with a log where all such work is done."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def start(self) -> None:
        await self.ask(self._read)
        self._task = asyncio.create_task(self._look())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            if not self.viewers:
                continue
            for message in await self.ask(self._read):
                for viewer in list(self.viewers):
                    if viewer.full():
                        self.viewers.discard(viewer)  # its stream ends, and the page asks again
                    else:
                        viewer.put_nowait(message)

    def _read(self) -> list[str]:
        messages = []
        for run in self._finder.more():  # the page asks for its points when it hears of it
            run.poll()
            self.runs[run.id] = run
            messages.append(json.dumps(to_json({"began": run.told()}), allow_nan=False))
        for run in self.runs.values():
            new, incidents = run.poll(), run.new_incidents()
            since, self._rows[run.id] = self._rows.get(run.id, 0), new.rows
            state = state_json(run.state())
            if not new.empty or incidents or state != self._states.get(run.id):
                told = {
                    "run": run.id,
                    "since": since,
                    "incidents": incidents,
                    "state": state,
                    "segments": history.segments_of(run.series),
                    **history.delta(new, run.foreseen(new=True)),
                }
                told["events"] += run.foretold(new=True)
                self._states[run.id] = state
                messages.append(json.dumps(to_json(told), allow_nan=False))
        return messages

    async def facts(self, run: Run) -> dict[str, object]:
        """The cause and the settings of a run: seconds of reading. A page that asks again waits for the same."""
        if run.id not in self._asked:
            self._asked[run.id] = asyncio.create_task(self._learn(run))
            self._asked[run.id].add_done_callback(lambda _: self._asked.pop(run.id, None))
        return await asyncio.shield(self._asked[run.id])

    async def _learn(self, run: Run) -> dict[str, object]:
        state, incidents = await self.ask(lambda: (run.state(), run.incidents()))
        return await _apart(facts_of, run.home, state, incidents)

    def overview(self) -> list[dict[str, Any]]:
        if not self.viewers:  # while somebody looks, it is read for them anyway
            self._read()
        return [run.told() for run in self.runs.values()]


async def _apart(function: Callable[..., T], *args: Any) -> T:
    """Do something long in a thread of its own: points keep coming, and Ctrl-C does not wait for it."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast(T, value))

    def work() -> None:
        value, failed = None, None
        try:
            value = function(*args)
        except Exception as error:
            failed = error
        with suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=work, daemon=True, name="nanproof-facts").start()
    return await result


def make_app(finder: Finder, *, token: str, hosts: frozenset[str]) -> App:
    """The whole application, for a server or a test."""
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import Response, StreamingResponse
        from starlette.routing import Route
    except ModuleNotFoundError:
        raise UsageError("the page needs starlette and uvicorn", hint="pip install 'nanproof[ui]'") from None
    desk = Desk(finder)

    def answer(data: object) -> Response:
        return Response(json.dumps(to_json(data), allow_nan=False), media_type="application/json")

    def missing() -> Response:
        return Response("nothing here", status_code=404, media_type="text/plain")

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in PAGE:
            return missing()
        return Response(page_file(name), media_type=TYPES[name.rsplit(".", 1)[1]])

    async def overview(request: Request) -> Response:
        return answer(await desk.ask(desk.overview))

    async def points(request: Request) -> Response:
        run = desk.runs.get(request.path_params["run"])
        if run is None:
            return missing()
        low, high = _number(request.query_params.get("low")), _number(request.query_params.get("high"))
        body = await desk.ask(lambda: history.encode(run.series, low, high, more=run.foreseen()))
        return Response(body, media_type="application/octet-stream")

    async def incident(request: Request) -> Response:
        run = desk.runs.get(request.path_params["run"])
        found = run.incident(request.path_params["key"]) if run else None
        return missing() if found is None else answer(found)

    async def facts(request: Request) -> Response:
        run = desk.runs.get(request.path_params["run"])
        return missing() if run is None else answer(await desk.facts(run))

    async def compared(request: Request) -> Response:
        pair = list(desk.runs.values())
        return answer(await desk.ask(compare, *pair) if len(pair) == 2 else None)

    async def stream(request: Request) -> Response:
        if len(desk.viewers) >= VIEWERS:
            return Response("too many viewers", status_code=503, media_type="text/plain")
        return StreamingResponse(_messages(desk), media_type="text/event-stream")

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await desk.start()
        yield
        await desk.stop()

    base = "/{token}"
    routes = [
        Route(f"{base}/", page),
        Route(f"{base}/runs", overview),
        Route(f"{base}/points/{{run}}", points),
        Route(f"{base}/incident/{{run}}/{{key}}", incident),
        Route(f"{base}/stream", stream),
        Route(f"{base}/facts/{{run}}", facts),
        Route(f"{base}/compared", compared),
        Route(f"{base}/page/{{name:path}}", page),
    ]
    return Gatekeeper(Starlette(routes=routes, lifespan=lifespan), token=token, hosts=hosts)


async def _messages(desk: Desk) -> AsyncIterator[str]:
    """One viewer's stream; a blank comment now and then lets a dead connection be noticed."""
    queue: asyncio.Queue[str] = asyncio.Queue(QUEUE)
    desk.viewers.add(queue)
    try:
        yield "retry: 1000\n\n"
        while queue in desk.viewers:
            try:
                yield f"data: {await asyncio.wait_for(queue.get(), 15)}\n\n"
            except TimeoutError:
                yield ": still here\n\n"
    finally:
        desk.viewers.discard(queue)


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is not None and abs(value) < 1e18 else None


def serve(
    finder: Finder, *, host: str = "127.0.0.1", port: int = 0, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until interrupted; ``ready`` gets the address to open, which holds the token."""
    try:
        import uvicorn
    except ModuleNotFoundError:
        raise UsageError("the page needs starlette and uvicorn", hint="pip install 'nanproof[ui]'") from None
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"{host}:{port} cannot be used: {error.strerror}", hint="choose another --port") from None
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    names = (
        {host, socket.gethostname(), "localhost", "127.0.0.1"} if host != "127.0.0.1" else {"localhost", "127.0.0.1"}
    )
    app = make_app(finder, token=token, hosts=frozenset(f"{n}:{port}" for n in names))
    config = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=16384,
        http=limited(),
        ws="none",
        timeout_keep_alive=10,
        server_header=False,
        proxy_headers=False,
    )
    server = _Server(config, lambda: ready(f"http://{_shown(host)}:{port}/{token}/") if ready else None)
    with listener:
        server.run(sockets=[listener])


def _shown(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _Server(config: Any, ready: Callable[[], None]) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            ready()

    return Server(config)
