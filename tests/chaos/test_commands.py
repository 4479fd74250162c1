"""The commands behind `make chaos`, `make peers` and `make soak`, each on the smallest piece of its work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.forked import run_python

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(str(SCRIPTS / script), *arguments, apart=True)


def test_one_trial_again() -> None:
    done = run("campaign.py", "--seed", "files:journal/rename:2:kill")
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr


def test_a_wrong_seed_gets_a_sentence() -> None:
    done = run("campaign.py", "--seed", "nothing:1")
    assert done.returncode == 2
    assert done.stderr.startswith("no trial 'nothing:1'. Next: numeric:17")


def test_one_cell_of_the_peers() -> None:
    done = run("peers.py", "NaN loss", "plain loop")
    assert (done.returncode, done.stdout) == (0, "| NaN loss | NaN | **equal** |\n"), done.stderr


@pytest.mark.campaign
def test_a_short_soak() -> None:
    """In a process of its own: it measures its memory, and a forked one still takes up that of its parent."""
    command = [sys.executable, str(SCRIPTS / "soak.py"), "--steps", "1500", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("reached") == 5
