"""The server by itself: who may ask, for what, and what they get."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from nanproof.errors import UsageError
from nanproof.watch.runs import Finder, find_runs
from nanproof.watch.security import POLICY
from nanproof.watch.server import PAGE, Desk, page_file, serve
from support.incidents import make_incident


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    folder.mkdir()
    (folder / "training_log.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n')
    make_incident(folder)
    return folder


@pytest.fixture(scope="module")
def address(run: Path, serve: Callable[..., str]) -> str:
    return serve(str(run))


def test_the_page_and_its_data(address: str) -> None:
    page = httpx.get(address)
    assert page.status_code == 200
    assert page.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert page.headers["x-content-type-options"] == "nosniff"
    runs = httpx.get(address + "runs").json()
    assert [r["name"] for r in runs] == ["a"]
    incident = runs[0]["incidents"][0]
    whole = httpx.get(f"{address}incident/{runs[0]['id']}/{incident['id']}").json()
    assert whole["location"]["op"] == "log"
    assert httpx.get(f"{address}points/{runs[0]['id']}").status_code == 200
    for name in PAGE:
        assert httpx.get(f"{address}page/{name}").status_code == 200, name


def test_only_this_machine_by_its_own_name(address: str) -> None:
    host = address.split("/")[2]
    port = host.split(":")[1]
    for name, status in (
        (host, 200),
        (f"localhost:{port}", 200),
        ("evil.example", 421),
        (f"evil.example:{port}", 421),
        ("127.0.0.1", 421),
        (f"127.0.0.1:{port}.evil.example", 421),
        ("", 421),
    ):
        assert httpx.get(address, headers={"host": name}).status_code == status, name


def test_other_sites_may_not_ask(address: str) -> None:
    host = address.split("/")[2]
    assert httpx.get(address + "runs", headers={"origin": "http://evil.example"}).status_code == 403
    assert httpx.get(address + "runs", headers={"origin": "null"}).status_code == 403
    assert httpx.get(address + "runs", headers={"origin": f"http://{host}"}).status_code == 200
    assert "access-control-allow-origin" not in httpx.get(address).headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(address: str, method: str) -> None:
    assert httpx.request(method, address).status_code == 405


def test_without_the_token_there_is_nothing(address: str) -> None:
    root = "/".join(address.split("/")[:3])
    token = address.split("/")[3]
    for path in ("/", "/runs", f"/{token[:-1]}/", f"/{token}x/", "/page/app.js", f"//{token}/", f"/x/{token}/"):
        answer = httpx.get(root + path)
        assert answer.status_code == 404, path
        assert token not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "page/../server.py",
        "page/..%2fserver.py",
        "page/%2e%2e/server.py",
        "page//etc/passwd",
        "page/vendor/../../runs.py",
        "points/..%2f..%2fetc",
        "points/r99",
        "incident/r0/..%2f..",
        "incident/r0/r0i99",
        "page/",
        "page/style.css%00.js",
    ],
)
def test_no_path_leads_out(address: str, path: str) -> None:
    answer = httpx.get(address + path)
    assert answer.status_code in (404, 307, 405), path
    assert "import" not in answer.text
    assert "root:" not in answer.text


@pytest.mark.parametrize("query", ["low=x&high=y", "low=nan&high=inf", "low=1e400", "low=5&high=1", "low=", "x=1"])
def test_odd_ranges_are_answered(address: str, query: str) -> None:
    assert httpx.get(f"{address}points/r0?{query}").status_code == 200


def test_news_reaches_two_viewers(address: str, run: Path) -> None:
    log = run / "training_log.jsonl"

    stream = address + "stream"
    with httpx.stream("GET", stream, timeout=600) as one, httpx.stream("GET", stream, timeout=600) as two:
        lines = [one.iter_lines(), two.iter_lines()]
        for each in lines:
            assert next(each).startswith("retry")  # it listens now
        with log.open("a") as file:
            file.write('{"step": 3, "loss": -Infinity}\n')
        for each in lines:
            news = (json.loads(line[6:]) for line in each if line.startswith("data: "))
            told = next(n for n in news if "loss" in n["columns"])  # before it: that the run is written again
            assert told["columns"]["loss"]["bad"] == [[3, 3, 0, 0, 1]]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"cannot be used.*choose another --port"):
            serve(Finder([str(tmp_path / "a.jsonl")]), port=taken.getsockname()[1])


def test_nothing_to_watch(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run given"):
        find_runs([])
    with pytest.raises(UsageError, match="does not exist"):
        find_runs([str(tmp_path / "no" / "such" / "run")])


def test_the_page_is_light() -> None:
    assert sum(len(page_file(name)) for name in PAGE) <= 150_000


def test_pages_that_ask_at_once_share_one_diagnosis(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go = [], threading.Event()

    def slow(*args: object) -> dict[str, object]:
        asked.append(args)
        go.wait(30)
        return {"settings": {}}

    async def look() -> None:
        desk = Desk(Finder([str(run)]))
        (one,) = desk.runs.values()
        pages = [asyncio.ensure_future(desk.facts(one)) for _ in range(3)]
        while not asked:
            await asyncio.sleep(0.01)
        pages[0].cancel()  # a page that is closed does not end it for the others
        go.set()
        assert await asyncio.gather(*pages[1:]) == [{"settings": {}}] * 2
        assert len(asked) == 1
        await desk.facts(one)
        assert len(asked) == 2  # the code may have changed since
        await desk.stop()

    monkeypatch.setattr("nanproof.watch.server.facts_of", slow)
    asyncio.run(look())


def test_ending_does_not_wait_for_a_diagnosis(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr("nanproof.watch.server.facts_of", lambda *_: never.wait())

    async def look() -> None:
        desk = Desk(Finder([str(run)]))
        page = asyncio.ensure_future(desk.facts(next(iter(desk.runs.values()))))
        while not any(t.name == "nanproof-facts" for t in threading.enumerate()):
            await asyncio.sleep(0.01)
        page.cancel()
        await desk.stop()

    asyncio.run(look())  # would not return if the loop had to join the thread
    assert all(t.daemon for t in threading.enumerate() if t.name == "nanproof-facts")
    never.set()
