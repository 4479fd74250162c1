"""The page of `nanproof watch --web` in a real browser: a run of a million steps, zoomed, panned, and growing."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from measure import verdict
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from nanproof.watch.server import PAGE, page_file

PACKAGES = ("starlette", "uvicorn", "selenium")
STEPS = 1_000_000
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--window-size=1400,900",
)
PAINT = "return document.body.dataset.ready == 'yes'"
# Draws as often as the browser lets it, moving the view a little each time, and counts the frames.
PAN = """
const done = arguments[0], place = document.querySelector('.plot');
let frames = 0, start = performance.now();
function frame() {
  place.dispatchEvent(new KeyboardEvent('keydown', {key: frames % 40 < 20 ? 'ArrowRight' : 'ArrowLeft'}));
  frames += 1;
  if (performance.now() - start < 3000) requestAnimationFrame(frame);
  else done(frames / (performance.now() - start) * 1000);
}
place.dispatchEvent(new KeyboardEvent('keydown', {key: '+'}));
requestAnimationFrame(frame);
"""


def write(path: Path) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for step in range(STEPS):
            loss = math.nan if step in (400_000, 700_001) else 3 * math.exp(-step / 3e5) + 0.3 + draw.random() / 5
            file.write(json.dumps({"step": step, "loss": loss, "grad_norm": draw.random(), "lr": 1e-4}) + "\n")


def open_browser(profile: str) -> webdriver.Chrome:
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def until(browser: webdriver.Chrome, script: str) -> float:
    start = time.monotonic()
    while not browser.execute_script(script):
        assert time.monotonic() - start < 60, script
        time.sleep(0.005)
    return time.monotonic() - start


@contextmanager
def serving(log: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server of one log: its address and its process."""
    command = [sys.executable, "-m", "nanproof", "watch", "--web", str(log)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)


def report() -> str:
    """The table of what the page does with a million steps."""
    folder = Path(tempfile.mkdtemp())
    log = folder / "train.jsonl"
    write(log)
    try:
        with serving(log) as (address, process):
            browser = open_browser(str(folder / "profile"))
            try:
                paints = []
                for _ in range(5):
                    browser.get("about:blank")
                    start = time.monotonic()
                    browser.get(address)
                    until(browser, PAINT)
                    paints.append(time.monotonic() - start)
                frames = browser.execute_async_script(PAN)
                delays = [_delay(browser, log, STEPS + i) for i in range(20)]
                memory = psutil.Process(process.pid).memory_info().rss / 1e6
            finally:
                browser.quit()
    finally:
        shutil.rmtree(folder)
    weight = sum(len(page_file(name)) for name in PAGE) / 1000
    paint, delay = statistics.median(paints), 1000 * statistics.median(delays)
    rows = [
        ("first paint of a run of 1,000,000 steps", f"{paint:.2f} s", "< 1.5 s", paint < 1.5),
        ("panning, charts redrawn in each frame", f"{frames:.0f} frames/s", "≥ 30", frames >= 30),
        ("a step's record on the page after it was written", f"{delay:.0f} ms", "≤ 500 ms", delay <= 500),
        ("the server's memory", f"{memory:.0f} MB", "≤ 200 MB", memory <= 200),
        ("the page's own weight", f"{weight:.0f} KB", "≤ 150 KB", weight <= 150),
    ]
    table = [f"| {a} | {b} | {c} | {verdict(good)} |" for a, b, c, good in rows]
    return "\n".join(["| what | measured | to reach | |", "|---|---|---|---|", *table])


def _delay(browser: webdriver.Chrome, log: Path, step: int) -> float:
    with log.open("a") as file:
        file.write(json.dumps({"step": step, "loss": 0.3, "grad_norm": 0.5, "lr": 1e-4}) + "\n")
    return until(browser, f"return document.getElementById('summary').textContent.includes('{step:,}')")
