"""One bad sample under Hugging Face's Trainer and TRL's SFTTrainer, without the callback and with it.

`python tests/integrations/story.py --write` puts the table into docs/integrations.md; a test compares the two.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanproof import scan
from nanproof.files import read_jsonl, write_atomic

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"
BEGIN, END = "<!-- story: begin -->", "<!-- story: end -->"
SCRIPTS = {"Trainer": "hugging_face.py", "SFTTrainer": "trl_sft.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a training with one bad sample ended."""

    losses: tuple[float, ...]
    """As the Trainer logged them."""
    finite: int
    tensors: int
    saved: dict[int, str]
    """The health of each checkpoint when it was saved, by step."""
    left: dict[int, str]
    """That of those which retention has left."""
    incident: dict[str, Any] | None = None
    raw: tuple[Any, ...] = ()
    """The losses in the guard's log."""


def train(script: str, folder: Path, *, guarded: bool) -> Ended:
    """Run one of the scripts in this process."""
    from transformers.trainer import DEFAULT_CALLBACKS, TrainerCallback

    saved: dict[int, str] = {}

    class Watching(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved.update(_on_disk(folder / "out"))

    run = folder / "run"
    before = sys.argv
    DEFAULT_CALLBACKS.append(Watching)
    sys.argv = [script, "--out", str(folder / "out"), *(["--callback", str(run)] if guarded else [])]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = runpy.run_path(str(ROOT / "tests" / "scripts" / script), run_name="__main__")["trainer"]
    finally:
        sys.argv = before
        DEFAULT_CALLBACKS.remove(Watching)
    found = [json.loads(p.read_text()) for p in run.glob("incidents/*/incident.json")]
    parameters = list(trainer.model.parameters())
    return Ended(
        losses=tuple(line["loss"] for line in trainer.state.log_history if "loss" in line),
        finite=sum(bool(torch.isfinite(p).all()) for p in parameters),
        tensors=len(parameters),
        saved=saved,
        left=_on_disk(folder / "out"),
        incident=found[0] if len(found) == 1 else None,
        raw=tuple(line["loss"] for line in read_jsonl(run / "training_log.jsonl")) if guarded else (),
    )


def _on_disk(folder: Path) -> dict[int, str]:
    found = sorted((int(p.name.rpartition("-")[2]), p) for p in folder.glob("checkpoint-*"))
    return {step: scan(path / "model.safetensors").health for step, path in found}


def tell(ends: dict[str, tuple[Ended, Ended]]) -> str:
    """The table: for each trainer what happened without the callback, and with it."""
    columns = [(n, e) for name, (bare, kept) in ends.items() for n, e in ((name, bare), (f"{name}, guarded", kept))]
    rows: dict[str, list[str]] = {
        "losses that the Trainer logs": [f"{_zeros(e.losses)} of {len(e.losses)} are 0.0" for _, e in columns],
        "the bad step in nanproof's log": [", ".join(_bad(e.raw)) or "–" for _, e in columns],
        "parameters finite at the end": [f"{e.finite} of {e.tensors}" for _, e in columns],
        "checkpoints as they were saved": [_healths(e.saved) for _, e in columns],
        "checkpoints left on disk": [_healths(e.left) for _, e in columns],
        "the batch, by name": [e.incident["notes"][0] if e.incident else "–" for _, e in columns],
    }
    lines = ["| | " + " | ".join(name for name, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def _healths(checkpoints: dict[int, str]) -> str:
    return ", ".join(f"{step}: {health}" for step, health in checkpoints.items())


def _zeros(losses: tuple[float, ...]) -> int:
    return sum(v == 0.0 for v in losses)


def _bad(raw: tuple[Any, ...]) -> list[str]:
    return [f"step {i + 1}: {v}" for i, v in enumerate(raw) if isinstance(v, str)]


def run_all(folder: Path) -> dict[str, tuple[Ended, Ended]]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return {
        name: (
            train(script, folder / name / "bare", guarded=False),
            train(script, folder / name / "kept", guarded=True),
        )
        for name, script in SCRIPTS.items()
    }


def on_the_page() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        table = tell(run_all(Path(place)))
    print(table)
    if "--write" in sys.argv:
        before_it, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        write_atomic(PAGE, f"{before_it}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
