"""The pictures of docs/images, taken of real trainings: python scripts/pictures.py

Trains a small model twice under the guard (once with bad data), once without it until it dies, and looks at the folder
with `nanproof watch`: in headless Chromium, and in the terminal as rich draws it.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

IMAGES = Path(__file__).parent.parent / "docs" / "images"
TRAIN = """
import json, sys, torch
from torch import nn
from nanproof import Guard
from nanproof.guard.options import Watch
name, lr, guarded, bad = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "guarded", {int(s) for s in sys.argv[4:]}
torch.manual_seed(0)
net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(16, 16), nn.Tanh())], nn.Linear(16, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
watch = Watch(modules=["*"], params=["*.weight"], every=5)
guard = Guard(net, optimizer, run_dir=name, watch=watch) if guarded else None
log = None if guarded else open(f"{name}/training_log.jsonl", "w")
for step in range(300):
    x = torch.randn(32, 16)
    target = (x[:, 0] > 0).long()
    if step in bad:
        x[0, 0] = float("nan")
    def loss_of():
        return nn.functional.cross_entropy(net(x), target)
    if guard is not None:
        guard.step(loss_of)
        continue
    loss = loss_of()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(json.dumps({"step": step + 1, "loss": loss.item(), "lr": lr}), file=log, flush=True)
"""
RUNS = (("baseline", "1e-3", "guarded", ()), ("guarded", "3e-3", "guarded", ("109", "110")),
        ("unguarded", "3e-3", "plain", ("109",)))  # fmt: skip


def train(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    for name, rate, how, bad in RUNS:
        run = folder / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"optimizer:\n  name: adamw\n  lr: {rate}\nmax_steps: 300\n")
        words = [sys.executable, "train.py", f"runs/{name}", rate, how, *bad]
        subprocess.run(words, cwd=folder, check=True, timeout=600, stderr=subprocess.DEVNULL)


def photograph(page: Path, shots: dict[str, tuple[int, int, bool, str]]) -> None:
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    profile = tempfile.mkdtemp()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver"), env={**os.environ}))
    try:
        for name, (width, height, dark, script) in shots.items():
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            browser.get("about:blank")
            browser.get(page.as_uri())
            until = time.monotonic() + 60
            while not browser.execute_script("return document.body.dataset.facts") and time.monotonic() < until:
                time.sleep(0.1)
            if dark:
                browser.execute_script("document.getElementById('theme').click()")
            browser.execute_script(script)
            time.sleep(0.5)
            browser.save_screenshot(str(IMAGES / f"{name}.png"))
            print(f"wrote docs/images/{name}.png")
    finally:
        browser.quit()
        shutil.rmtree(profile, ignore_errors=True)


def terminal(paths: list[str]) -> None:
    from nanproof.watch.runs import find_runs
    from nanproof.watch.tui import watch

    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
    watch(find_runs(paths), once=True, console=console)
    picture = console.export_svg(title="nanproof watch runs")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # no fonts from the network
    picture = re.sub(r"<!--.*?-->", "", picture, flags=re.DOTALL)
    (IMAGES / "watch-terminal.svg").write_text(picture)
    print("wrote docs/images/watch-terminal.svg")


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    train(folder)
    os.chdir(folder)
    words = [sys.executable, "-m", "nanproof", "report", "runs", "-o", "runs.html", "--json"]
    done = subprocess.run(words, check=True, timeout=600, capture_output=True, text=True)
    print([run["state"] for run in json.loads(done.stdout)["runs"]])
    click = "document.querySelector('#incidents button').click()"
    photograph(
        folder / "runs.html",
        {
            "watch": (1400, 1000, False, ""), "watch-dark": (1100, 900, True, ""), "watch-phone": (390, 844, False, ""),
            "incident": (1100, 1000, False, click),
            "layers": (1400, 700, False, "document.getElementById('layers').scrollIntoView()"),
        },
    )  # fmt: skip
    terminal(["runs"])
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
