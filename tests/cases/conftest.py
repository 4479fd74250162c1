"""Each training is run once and shared: by tests, by files, and by the workers of pytest-xdist."""

from __future__ import annotations

import os

import pytest
from filelock import FileLock

from nanproof.cases import find
from support.trainings import Train, Trained, run


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train a case once: ``train("radiodiff", "stable", seed=1)``; with ``policy=`` under the guard."""
    here = tmp_path_factory.getbasetemp()
    root = (here.parent if "PYTEST_XDIST_WORKER" in os.environ else here) / "trained"
    root.mkdir(exist_ok=True)

    def train_once(
        case: str, config: str = "original", *, seed: int = 0, steps: int | None = None, policy: str | None = None
    ) -> Trained:
        name = "-".join(map(str, filter(None, (case, config, f"seed{seed}", steps, policy))))
        folder, guard, said = root / name, root / f"{name}-guard", root / f"{name}.txt"
        lock = case if case == "lora-sft" else name  # runs of lora-sft share a base model
        with FileLock(root / f"{lock}.lock"):
            if not said.exists():
                program = find(case).command(config, seed=seed, steps=steps, out=folder)[1:]
                guarded = ("-m", "nanproof", "run", "--policy", str(policy), "--run-dir", str(guard))
                words = (*guarded, *program) if policy else program
                output = run(*words, expect=(0, 66) if policy else (0,))
                said.write_text(output)
        return Trained(folder=folder, guard=guard, output=said.read_text())

    return train_once
