"""Incidents as a guarded run leaves them, without the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanproof.records import Action, Incident, Reading, TensorFacts, Verdict


def make_incident(run_dir: Path, step: int = 2, **location: Any) -> Path:
    """Write one incident into a run's folder."""
    facts = TensorFacts(
        name="input 0", shape=(2, 3), dtype="float32", nan=1, first_bad=(0, 1), finite_min=0.0, finite_max=1.0
    )
    place = {
        "reproduced": True,
        "phase": "forward",
        "op": "log",
        "file": "model.py",
        "line": 12,
        "function": "forward",
        "code": ["      11 | p = p.softmax(-1)", "  >   12 | return p.log()"],
        "module": "head",
        "mechanism": "pole",
        "why": "log at exactly zero is infinite",
        "inputs": [],
        "outputs": [],
        "chain": ["log", "mean", "loss"],
        "verified": True,
        **location,
    }
    incident = Incident(
        id=f"{step:06}",
        step=step,
        time="2026-01-01T00:00:00",
        rank=0,
        world_size=1,
        verdict=Verdict(kind="nonfinite", step=step, level="loss", value=float("nan")),
        action=Action(kind="skip"),
        tensors=(facts,),
        readings=(Reading(step=step - 1, loss=2.0, grad_norm=1.0, lr=1e-4),),
        location=place,
    )
    folder = run_dir / "incidents" / incident.id
    folder.mkdir(parents=True)
    (folder / "incident.json").write_text(json.dumps(incident.to_json()))
    return folder
