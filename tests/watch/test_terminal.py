"""Watching in the terminal: what a frame says, a real pseudo-terminal, and messages to a real server."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import select
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from nanproof.cli.shell import nanproof as nanproof_group
from nanproof.errors import UsageError
from nanproof.logs import read
from nanproof.watch.glance import glance
from nanproof.watch.notify import SILENCE, Notifier, payload
from nanproof.watch.occasions import occasions
from nanproof.watch.runs import Finder
from nanproof.watch.sparkline import BAD, BARS, sparkline
from nanproof.watch.tui import watch
from support.incidents import make_incident
from support.pages import write_log


@given(st.lists(st.floats(), max_size=300), st.integers(1, 80))
@example([3e292, -1.7976931348623155e308], 2)
@example([1.7e308, 1.7e308, 1.0], 1)
@example([5e-324, 0.0], 2)
def test_a_sparkline_is_as_wide_as_asked_and_never_hides_a_bad_value(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(BARS + BAD)
    assert (BAD in line) == any(not math.isfinite(v) for v in values)


def shown(folder: Path, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    watch(Finder([str(folder)]), once=True, console=console)
    return console.export_text()


def test_a_frame_says_what_matters(tmp_path: Path) -> None:
    write_log(tmp_path / "training_log.jsonl", 100, bad=(98, 99))
    make_incident(tmp_path, 98)
    text = shown(tmp_path)
    assert "died at step 98: loss is NaN since step 98 (2 logged values, the last at step 99)" in text
    assert "nonfinite loss nan → skip: pole in log, model.py:12" in text
    assert BAD in text


@pytest.mark.parametrize("width", [20, 46, 80, 200])
def test_every_width_works_and_nothing_runs_over(tmp_path: Path, width: int) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name / "training_log.jsonl", 50)
    text = shown(tmp_path, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "a" in text


def test_names_full_of_control_characters_do_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "x\x1b[31m\x07[bold]y"
    folder.mkdir()
    write_log(folder / "training_log.jsonl", 5)
    text = shown(folder)
    assert "\x1b" not in text
    assert "[bold]y" in text


def test_an_empty_log_is_waited_for_and_one_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("")
    assert "no values yet" in shown(tmp_path / "a.log")
    with pytest.raises(UsageError, match=r"later\.log does not exist"):
        shown(tmp_path / "later.log")


def test_in_a_real_terminal_q_quits_and_news_appear(tmp_path: Path) -> None:
    log = tmp_path / "training_log.jsonl"
    write_log(log, 10)
    main, child = pty.openpty()
    command = [sys.executable, "-m", "nanproof", "watch", str(tmp_path)]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env={**os.environ, "TERM": "xterm"})
    os.close(child)
    try:
        until(main, "step 9")
        write_log(log, 5, first=10, mode="a")
        until(main, "step 14")
        os.write(main, b"q")
        drain(main)
        assert process.wait(timeout=600) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)


def until(fd: int, words: str, seconds: float = 300) -> None:
    text, deadline = "", time.monotonic() + seconds
    while words not in text:
        assert time.monotonic() < deadline, text[-2000:]
        if select.select([fd], [], [], 0.2)[0]:
            text += os.read(fd, 65536).decode(errors="replace")


def drain(fd: int) -> None:
    try:
        while select.select([fd], [], [], 0.5)[0] and os.read(fd, 65536):
            pass
    except OSError:
        pass  # the other end is closed


class Inbox(BaseHTTPRequestHandler):
    received: list[bytes]

    def do_POST(self) -> None:
        type(self).received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def inbox() -> Iterator[tuple[str, list[bytes]]]:
    handler = type("Box", (Inbox,), {"received": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", handler.received
        server.shutdown()


def test_messages_arrive_once(inbox: tuple[str, list[bytes]]) -> None:
    address, received = inbox
    now = [0.0]
    notifier = Notifier(address, clock=lambda: now[0])
    assert notifier.tell("a", "nonfinite", "loss is nan")
    assert not notifier.tell("a", "nonfinite", "loss is nan again")
    assert notifier.tell("b", "nonfinite", "another run")
    now[0] = SILENCE
    assert notifier.tell("a", "nonfinite", "loss is nan after a while")
    notifier.close(20)
    told = [json.loads(r) for r in received]
    assert [(t["run"], t["text"]) for t in told] == [
        ("a", "loss is nan"),
        ("b", "another run"),
        ("a", "loss is nan after a while"),
    ]
    assert (notifier.sent, notifier.dropped) == (3, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what apprise imports
def test_other_services_are_reached_through_apprise(
    inbox: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("apprise")
    address, got = inbox
    monkeypatch.setenv("NANPROOF_ALERTS", address.replace("http://", "json://"))
    notifier = Notifier()
    assert notifier.tell("a", "stop", "stopped at step 5")
    notifier.close(300)
    assert (notifier.sent, notifier.dropped) == (1, 0)
    assert json.loads(got[0])["message"] == "stopped at step 5"
    monkeypatch.setenv("NANPROOF_ALERTS", "nosuchservice://secret")
    with pytest.raises(UsageError, match="address 1 in NANPROOF_ALERTS") as refused:
        Notifier()
    assert "secret" not in str(refused.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Unverified HTTPS")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_a_message_reaches_teams_as_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through apprise's own code for Teams' Workflows, to a server of ours with a certificate of its own."""
    pytest.importorskip("apprise")
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*new, "-keyout", "key.pem", "-out", "own.pem"], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "key.pem")
    paths: list[str] = []
    noted = {"received": [], "do_POST": lambda self: (paths.append(self.path), Inbox.do_POST(self))}
    handler = type("Box", (Inbox,), noted)
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NANPROOF_ALERTS", f"workflows://127.0.0.1:{server.server_port}/FLOW/SIGN/?verify=no")
        notifier = Notifier()
        assert notifier.tell("a", "stop", "stopped at step 5")
        notifier.close(300)
        server.shutdown()
    assert (notifier.sent, notifier.dropped) == (1, 0)
    assert paths[0].startswith("/workflows/FLOW/triggers/manual/paths/invoke")
    (sent,) = handler.received
    card = json.loads(sent)["attachments"][0]
    assert card["contentType"] == "application/vnd.microsoft.card.adaptive"
    texts = [part.get("text") for part in card["content"]["body"]]
    assert "nanproof: a" in texts
    assert "stopped at step 5" in texts


def test_teams_own_address_is_known_to_apprise(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("apprise")
    shown = "https://prod-00.westus.logic.azure.com:443/workflows/643e69f8/triggers/manual/paths/invoke"
    monkeypatch.setenv("NANPROOF_ALERTS", f"{shown}?api-version=2016-06-01&sp=%2Ftriggers%2Fmanual%2Frun&sv=1.0&sig=x")
    Notifier().close(300)


def test_a_server_that_hangs_holds_nobody_up() -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        notifier = Notifier(f"http://127.0.0.1:{silent.getsockname()[1]}/")
        results = [notifier.tell(f"run {i}", "stop", "x") for i in range(100)]
        assert results.count(True) <= 33  # one on its way, and a full queue
        assert notifier.dropped >= 67
        notifier.close(0.1)


def test_a_server_that_is_not_there_only_costs_the_message() -> None:
    notifier = Notifier("http://127.0.0.1:9/")
    notifier.tell("a", "finish", "done")
    notifier.close(20)
    assert (notifier.sent, notifier.dropped) == (0, 1)
    assert "refused" in notifier.trouble


def test_an_alert_that_was_not_sent_is_said(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("step,loss\n1,2\n2,nan\n")
    environment = {"NANPROOF_WEBHOOK": "http://127.0.0.1:9/secret"}
    found = CliRunner().invoke(nanproof_group, ["watch", "--notify", "--once", str(log)], env=environment)
    assert found.exit_code == 0
    assert "1 alert was not sent: " in found.output
    assert "secret" not in found.output
    for other in ("--web", "--json"):
        found = CliRunner().invoke(nanproof_group, ["watch", "--notify", other, str(log)], env=environment)
        assert found.exit_code == 2
        assert f"{other} sends no alerts" in found.output


def test_shapes_of_messages() -> None:
    discord = json.loads(payload("https://discord.com/api/webhooks/1/x", "a", "stop", "@everyone"))
    assert discord["allowed_mentions"] == {"parse": []}
    assert json.loads(payload("https://example.org", "a", "stop", "x")) == {"run": "a", "occasion": "stop", "text": "x"}
    assert "slack" not in json.loads(payload("https://slack.com.evil.example", "a", "stop", "x")).get("text", "x")


def test_the_address_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANPROOF_WEBHOOK", raising=False)
    with pytest.raises(UsageError, match="export NANPROOF_WEBHOOK"):
        Notifier()
    with pytest.raises(UsageError, match="no web address"):
        Notifier("file:///etc/passwd")


def test_occasions(tmp_path: Path) -> None:
    log = tmp_path / "training_log.jsonl"
    write_log(log, 10)
    good = glance("a", read(log), [])
    write_log(log, 2, bad=(10, 11), first=10, mode="a")
    bad = glance("a", read(log), [])
    assert [o for o, _ in occasions(None, good)] == []
    assert [o for o, _ in occasions(good, bad)] == ["nonfinite"]
    assert [o for o, _ in occasions(None, bad)] == ["nonfinite"]
    assert [o for o, _ in occasions(bad, bad)] == []
    assert [o for o, _ in occasions(bad, good)] == ["recovery"]
    more = replace(good, counts={"rollback": 1, "stop": 1}, step=100, max_steps=100)
    assert [o for o, _ in occasions(replace(good, max_steps=100), more)] == ["rollback", "stop", "finish"]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="NO TERMINAL SNAPSHOTS: tmux is missing. Next: install tmux")
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_narrow_terminal_shows_whole_boxes_and_the_death_on_top(tmp_path: Path, encoding: str) -> None:
    for name, bad in (("alive", ()), ("dead", (8, 9)), ("a-run-with-a-very-long-name-that-does-not-fit", ())):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name / "training_log.jsonl", 10, bad=bad)
    make_incident(tmp_path / "dead", 8)
    socket, command = f"nanproof-{os.getpid()}", f"{sys.executable} -m nanproof watch {tmp_path}"
    tmux = ["tmux", "-L", socket, "-u"]
    size = {"COLUMNS": "60", "LINES": "40"}  # of this screen, not of the one that the tests run in
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "TERM": "xterm", "LC_ALL": "C.UTF-8", **size}
    start = [*tmux, "-f", "/dev/null", "new-session", "-d", "-x", "60", "-y", "40", command]
    subprocess.run(start, env=environment, check=True, timeout=300)
    try:
        deadline, lines = time.monotonic() + 300, [""]
        while not (any("q quits" in line for line in lines) and "died" in lines[0]):  # a screen that is drawn whole
            assert time.monotonic() < deadline, lines
            time.sleep(0.1)
            done = subprocess.run(
                [*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True, timeout=300
            )
            lines = done.stdout.splitlines()
        subprocess.run([*tmux, "send-keys", "q"], check=True, timeout=300)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, timeout=300, capture_output=True)
    assert "dead died at step 8" in lines[0]
    edges = "│" if encoding == "utf-8" else "|"
    boxed = [line for line in lines if line.startswith(edges)]
    assert len(boxed) > 10
    assert all(line.endswith(edges) and len(line) == 60 for line in boxed), "\n".join(boxed)
    assert encoding == "utf-8" or all(line.isascii() for line in lines)
