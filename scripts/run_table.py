"""Write the tables of docs/run.md: loops bare, guarded and without the bad batch; packages imported before torch.

    python scripts/run_table.py --write
    python scripts/run_table.py --packages --write

Other libraries are in the tables when they are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import tempfile
import textwrap
from importlib.metadata import packages_distributions, version
from pathlib import Path

import torch
from written import write_table

from run.launch import SCRIPTS, Ran, different, guarded, is_finite, nanproof, plain, run_bare, run_guarded
from run.test_batches import HEAD as BATCH_HEAD
from run.test_batches import LOOPS as BATCHES
from run.test_imports import PACKAGES
from run.test_loops import AVERAGE, HEAD, LOOPS, OWN_AVERAGES, TIMM_SCHEDULE

# whole scripts of tests/scripts, and the part that is left out in the run that never saw the fault
WHOLE = {
    "forward-forward: an optimizer for each layer": ("forward_forward.py", 7),
    "PPO: minibatches of a rollout with a NaN reward, met in every epoch": ("ppo.py", 2),
    "DCGAN: a NaN image, two backward passes for one step": ("dcgan.py", 3),
    "like timm's: an average and a schedule of the script's own, which move on": ("timm_style.py", 7),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/run.md")
    parser.add_argument("--packages", action="store_true", help="only the packages that are imported before torch")
    given = parser.parse_args()
    if given.packages:
        rows = [row for package in PACKAGES if (row := try_package(package))]
        text = "\n".join(["| imported before torch | version | the bad step |", "|---|---|---|", *rows])
        if given.write:
            write_table("run.md", "run_packages", text, ("torch",))
        return
    logging.getLogger("nanproof").setLevel(logging.CRITICAL)
    loops = dict(LOOPS)
    for library, (make, update) in OWN_AVERAGES.items():
        loops[f"an average of {library.partition('.')[0]}"] = AVERAGE.format(library=library, make=make, update=update)
    loops["a schedule of timm"] = TIMM_SCHEDULE
    rows = ["| loop | plain python | skipped | like a run without the batch |", "|---|---|---|---|"]
    rows += [row for name, loop in loops.items() if (row := try_loop(name, loop))]
    rows += [try_script(name, script, part) for name, (script, part) in WHOLE.items()]
    named = ["| loop | what the incident says |", "|---|---|"]
    named += [try_batch(name, loop) for name, (loop, _) in BATCHES.items()]
    text = "\n".join([*rows, "", *named])
    if given.write:
        packages = [p for p in ("timm", "diffusers", "ema_pytorch", "torch_ema") if importlib.util.find_spec(p)]
        write_table("run.md", "run_table", text, tuple(packages))


def try_loop(name: str, loop: str) -> str:
    """One line of the table, or none when its library is not installed."""
    source = HEAD + textwrap.dedent(loop)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            bare = plain(Path(folder), source)["end"]
        except ImportError:
            return ""
        ran = guarded(Path(folder), source)
        if ran.outcome.exit_code:
            raise SystemExit(f"{name}: exit code {ran.outcome.exit_code}\n{said.getvalue()}")
        without = plain(Path(folder), source, "--without")["end"]
    weights = {k: v for k, v in bare[0].items() if k != "mask"} if isinstance(bare[0], dict) else bare[0]
    return row_of(name, "finite" if is_finite(weights) else "weights not finite", ran, ran.main["end"], without)


def try_script(name: str, script: str, part: int) -> str:
    """The same for a script of tests/scripts, which writes its state into a file."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        bare, without, out = (str(Path(folder, word)) for word in ("bare", "without", "out"))
        try:
            run_bare(script, "--out", bare)
            end = "finite" if is_finite(torch.load(bare)) else "weights not finite"
        except ValueError as error:
            end = f"ends with {type(error).__name__}"
        run_bare(script, "--out", without, "--without", str(part))
        ran = run_guarded(script, Path(folder, "run"), "--out", out)
        return row_of(name, end, ran, torch.load(out), torch.load(without))


def row_of(name: str, bare: str, ran: Ran, guarded_end: object, without: object) -> str:
    left = different(guarded_end, without)
    skipped = sum(account.get("actions", {}).get("skip", 0) for account in ran.outcome.guarded)
    row = f"| {name} | {bare} | {skipped} | {'bit-equal' if not left else f'differs in {len(left)} tensors'} |"
    print(row, flush=True)
    return row


def try_batch(name: str, loop: str) -> str:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        ran = guarded(Path(folder), BATCH_HEAD + textwrap.dedent(loop))
        notes = [note for note in ran.incidents[0]["notes"] if "batch" in note]
    row = f"| {name} | {notes[0] if notes else 'no batch'} |"
    print(row, flush=True)
    return row


def try_package(package: str) -> str:
    """One line of the table, or none when the package is not installed."""
    if importlib.util.find_spec(package) is None:
        return ""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    with tempfile.TemporaryDirectory() as folder:
        words = ("run", "--run-dir", f"{folder}/run", SCRIPTS / "import_first.py", package)
        done = nanproof(*words, check=False, cwd=folder)
        record = json.loads(Path(folder, "run", "run.json").read_text())
    name = packages_distributions().get(package, [package])[0]
    if done.returncode and not record["attached"] and "torch" in record["reason"]:
        row = f"| {package} | {version(name)} | cannot be imported here |"
    else:
        skipped = sum(a.get("actions", {}).get("skip", 0) for a in record["guarded"])
        end = "skipped" if skipped == 1 and done.stdout.splitlines()[-1:] == ["finite"] else "NOT skipped"
        row = f"| {package} | {version(name)} | {end} |"
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
