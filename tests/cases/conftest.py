"""Each training is run once and shared: by tests, by files, and by the workers of pytest-xdist."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from nanproof.cases import find
from nanproof.cases.story import stages
from support.forked import run_python
from support.trainings import Story, Train, Trained, run

IN_THE_STORY = {
    ("original", None): (0, "original"),
    ("original", "default"): (3, "guarded"),
    ("stable", None): (7, "stable"),
}
"""The stages of the story that train, and their folders."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers see."""
    here = tmp_path_factory.getbasetemp()
    root = (here.parent if "PYTEST_XDIST_WORKER" in os.environ else here) / "trained"
    root.mkdir(exist_ok=True)
    return root


@pytest.fixture(scope="session")
def story(shared: Path) -> Story:
    """The stages of `nanproof case radiodiff --story`, once: their runs are the ones that tests of radiodiff read."""

    def tell_once() -> tuple[Path, list[dict[str, Any]]]:
        folder, said = shared / "story", shared / "story.json"
        with FileLock(shared / "story.lock"):
            if not said.exists():
                told = [(stage, run_python(*stage.words[1:])) for stage in stages(find("radiodiff"), folder, 0)]
                said.write_text(json.dumps([{"ok": d.returncode in s.ends, "said": d.stdout} for s, d in told]))
        return folder, json.loads(said.read_text())

    return tell_once


@pytest.fixture(scope="session")
def train(shared: Path, story: Story) -> Train:
    """Train a case once: ``train("radiodiff", "stable", seed=1)``; with ``policy=`` under the guard."""

    def train_once(
        case: str, config: str = "original", *, seed: int = 0, steps: int | None = None, policy: str | None = None
    ) -> Trained:
        if (case, seed, steps) == ("radiodiff", 0, None) and (config, policy) in IN_THE_STORY:
            number, trained = IN_THE_STORY[config, policy]
            folder, told = story()
            return Trained(folder=folder / trained, guard=folder / "guard", output=told[number]["said"])
        if case == "lora-sft" and policy:
            train_once(case, steps=5)  # makes the base model, which is not to be trained under the guard
        name = "-".join(map(str, filter(None, (case, config, f"seed{seed}", steps, policy))))
        folder, guard, said = shared / name, shared / f"{name}-guard", shared / f"{name}.txt"
        lock = case if case == "lora-sft" else name  # runs of lora-sft share a base model
        with FileLock(shared / f"{lock}.lock"):
            if not said.exists():
                program = find(case).command(config, seed=seed, steps=steps, out=folder)[1:]
                guarded = ("-m", "nanproof", "run", "--policy", str(policy), "--run-dir", str(guard))
                words = (*guarded, *program) if policy else program
                output = run(*words, expect=(0, 66) if policy else (0,))
                said.write_text(output)
        return Trained(folder=folder, guard=guard, output=said.read_text())

    return train_once
