"""A thousand clients at once on the page of ``watch --web``, slow and rude ones among them: ``make load``.

Each of the honest clients asks for the list of runs and, when it is sent away, asks again after a moment, as a browser
does. The others send half a request, send a byte now and then, do not finish a body, or say nothing at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "reliability.md"
ATTEMPTS = 60


async def ask(port: int, path: str) -> int:
    """The status of one GET; 0 when the connection was cut."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        data = await reader.read()
        writer.close()
    except OSError:
        return 0
    found = re.match(rb"HTTP/1\.1 (\d+)", data)
    return int(found[1]) if found else 0


async def honest(port: int, path: str, results: dict[str, list[float]]) -> None:
    began = time.monotonic()
    for _ in range(ATTEMPTS):
        if await ask(port, path) == 200:
            results["served"].append(time.monotonic() - began)
            return
        results["again"].append(1)
        await asyncio.sleep(random.uniform(0.1, 1.0))
    results["lost"].append(time.monotonic() - began)


async def rude(port: int, path: str, kind: int, results: dict[str, list[float]], until: float) -> None:
    """One of four kinds of bad client; it comes back when it is sent away."""
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.5)
            continue
        results["rude"].append(1)
        try:
            if kind in (0, 1):
                writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0".encode())
            elif kind == 2:
                writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: 99999\r\n\r\n".encode())
            while time.monotonic() < until:
                if kind == 1:
                    writer.write(b"x")
                    await writer.drain()
                if await asyncio.wait_for(reader.read(1), 1.0) == b"":
                    break
        except TimeoutError:
            await asyncio.sleep(1.0)
        except OSError:
            pass
        finally:
            writer.close()


async def campaign(address: str, clients: int, seconds: float) -> dict[str, list[float]]:
    port, path = urlsplit(address).port or 0, urlsplit(address).path + "runs"
    results: dict[str, list[float]] = {name: [] for name in ("served", "again", "lost", "rude")}
    bad = clients * 3 // 10
    until = time.monotonic() + seconds
    attackers = [asyncio.create_task(rude(port, path, i % 4, results, until)) for i in range(bad)]
    await asyncio.sleep(2)  # the bad ones are there first
    await asyncio.gather(*(honest(port, path, results) for _ in range(clients - bad)))
    for task in attackers:
        task.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    after = await ask(port, path)
    assert after == 200, f"the page answers {after} when all is over"
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--write", action="store_true", help="put the figures into docs/reliability.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "training_log.jsonl")
        log.write_text("".join(json.dumps({"step": i, "loss": 1.0}) + "\n" for i in range(1000)))
        command = [sys.executable, "-m", "nanproof", "watch", "--web", str(log)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            results = asyncio.run(asyncio.wait_for(campaign(address, options.clients, options.seconds), 300))
            status = Path(f"/proc/{server.pid}/status").read_text()
            files = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        finally:
            server.terminate()
            server.wait(20)
    times = sorted(results["served"]) or [float("nan")]
    memory = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) // 1024
    rows = [
        ("clients, of which rude", f"{options.clients:,}, {options.clients * 3 // 10:,}"),
        ("honest clients served", f"{len(results['served']):,} of {len(results['served']) + len(results['lost']):,}"),
        ("sent away and came back", f"{len(results['again']):,} times"),
        ("connections of rude clients", f"{len(results['rude']):,}"),
        ("median and longest wait", f"{times[len(times) // 2]:.1f} s, {times[-1]:.1f} s"),
        ("memory of the server, at most", f"{memory} MB"),
        ("files open when all is over", f"{files}"),
    ]
    table = "\n".join(["| under load | measured |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])
    print(table)
    if options.write:
        text = DOCS.read_text()
        begin, end = "<!-- load: begin -->\n", "<!-- load: end -->"
        head, tail = text.index(begin) + len(begin), text.index(end)
        DOCS.write_text(f"{text[:head]}{table}\n{text[tail:]}")
    if results["lost"]:
        sys.exit(f"{len(results['lost'])} honest clients were not served")


if __name__ == "__main__":
    main()
