"""The pictures of docs/images, taken of real trainings: python scripts/pictures.py

Trains a small model on data with two bad samples, twice under the guard and once without it, and looks at the folder
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
import argparse, json, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--log")
args = parser.parse_args()
torch.manual_seed(0)
data = torch.randn(300 * 32, 16)
data[109 * 32] = 1.0  # constant samples
data[110 * 32] = 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
log = open(args.log, "w") if args.log else None
for step, x in enumerate(torch.utils.data.DataLoader(data, batch_size=32)):
    loss = nn.functional.cross_entropy(net(x), (x[:, 0] > x[:, 1]).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if log:
        print(json.dumps({"step": step, "loss": loss.item(), "lr": args.lr}), file=log, flush=True)
"""
GUARDED = ("-m", "nanproof", "run", "--quiet", "--set", "watch.modules=*", "--set", "watch.params=*.weight")
RUNS = (
    (*GUARDED, "--run-dir", "runs/slow", "train.py", "--lr", "1e-3"),
    (*GUARDED, "--run-dir", "runs/guarded", "train.py", "--lr", "3e-3"),
    ("train.py", "--lr", "3e-3", "--log", "runs/unguarded/log.jsonl"),
)


def train(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "runs" / "unguarded").mkdir(parents=True)
    for words in RUNS:
        command = [sys.executable, *words]
        subprocess.run(command, cwd=folder, check=True, timeout=600, stderr=subprocess.DEVNULL)


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
    from nanproof.watch.runs import Finder
    from nanproof.watch.tui import watch

    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
    watch(Finder(paths), once=True, console=console)
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
            "watch": (1400, 1000, False, ""),
            "watch-dark": (1100, 900, True, ""),
            "watch-phone": (390, 844, False, ""),
            "incident": (1100, 1000, False, click),
            "layers": (1400, 700, False, "document.getElementById('layers').scrollIntoView()"),
        },
    )
    terminal(["runs"])
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
