"""An incident on disk: a folder with everything needed to understand the bad step and to play it again."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from .. import __version__
from ..files import atomic_folder, make_folder, write_atomic
from ..records import Incident, to_json
from ..tensors import bytes_of, children

FULL_BUNDLES = 20
"""How many incidents of a run keep their batch and states; later ones keep only the record."""
RECORDS = 1000
"""How many incidents of a run are kept at all: a run that fails 98,000 times must not fill the disk."""


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def environment(device: torch.device) -> dict[str, str]:
    """The versions that decide whether a replay elsewhere can be the same."""
    found = {
        "nanproof": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": str(torch.get_num_threads()),
    }
    for name in ("numpy", "transformers", "accelerate", "lightning"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


class IncidentFolder:
    """``run_dir/incidents``: one folder per incident, the first ones complete, the later ones short."""

    def __init__(self, run_dir: Path, *, max_bytes: int) -> None:
        self.path = run_dir / "incidents"
        self._max_bytes = max_bytes
        self._written = len(list(self.path.glob("[0-9]*"))) if self.path.is_dir() else 0

    @property
    def full(self) -> bool:
        return self._written >= FULL_BUNDLES

    def write(
        self,
        incident: Incident,
        batch: Any,
        buffers: dict[str, Tensor],
        random: dict[str, Any],
        weights: dict[str, Tensor],
    ) -> Path | None:
        """Keep an incident; None when there are too many already."""
        if self._written >= RECORDS:
            return None
        make_folder(self.path)
        target = self.path / incident.id
        n = 1
        while target.exists():  # a resumed run may count the same steps again
            n += 1
            target = self.path / f"{incident.id}.{n}"
        bundle, notes = dict(incident.bundle), list(incident.notes)
        with atomic_folder(target) as folder:
            if not self.full:
                if batch is not None:
                    self._write_batch(folder, batch, bundle, notes)
                self._write_tensors(folder, "buffers", buffers, bundle, notes)
                self._write_tensors(folder, "weights", weights, bundle, notes)
                _write_random(folder, random, bundle)
            record = dataclasses.replace(incident, bundle=bundle, notes=tuple(notes), id=target.name)
            write_atomic(folder / "incident.json", json.dumps(record.to_json(), indent=1, allow_nan=False) + "\n")
        self._written += 1
        return target

    def _write_batch(self, folder: Path, batch: Any, bundle: dict[str, str], notes: list[str]) -> None:
        tensors: dict[str, Tensor] = {}
        shape = _outline(batch, "batch", tensors)
        if self._write_tensors(folder, "batch", tensors, bundle, notes):
            write_atomic(folder / "batch.json", json.dumps(shape, indent=1) + "\n")
            bundle["batch outline"] = "batch.json"

    def _write_tensors(
        self, folder: Path, name: str, tensors: dict[str, Tensor], bundle: dict[str, str], notes: list[str]
    ) -> bool:
        if not tensors:
            return name == "batch"
        size = sum(bytes_of(t) for t in tensors.values())
        if size > self._max_bytes:
            notes.append(f"{name} not kept: {size:,} bytes, more than the limit of {self._max_bytes:,}")
            return False
        # contiguous clones: safetensors refuses tensors that share memory
        plain = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
        write_atomic(folder / f"{name}.safetensors", tensors_to_bytes(plain))
        bundle[name] = f"{name}.safetensors"
        return True


def _outline(value: Any, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """The shape of a batch as JSON; tensors are put aside under their paths."""
    if isinstance(value, Tensor):
        local = getattr(value, "_local_tensor", value)
        tensors[path] = local.to_dense() if local.layout != torch.strided else local
        return {"tensor": path}
    if value is None or isinstance(value, bool | int | float | str):
        return to_json(value)
    parts = list(children(value)) if depth < 6 else []
    if parts:
        items = {k: _outline(v, f"{path}.{k}", tensors, depth + 1) for k, v in parts}
        return {"kind": type(value).__name__, "items": items}
    return {"kind": type(value).__name__, "repr": repr(value)[:200]}


def _write_random(folder: Path, random: dict[str, Any], bundle: dict[str, str]) -> None:
    states = {k: v for k, v in random.items() if isinstance(v, Tensor)}
    states |= {f"cuda.{i}": state for i, state in enumerate(random.get("cuda", []))}
    if states:
        write_atomic(folder / "rng.safetensors", tensors_to_bytes(states))
        bundle["random states (torch)"] = "rng.safetensors"
    plain: dict[str, Any] = {"python": random["python"]} if "python" in random else {}
    if "numpy" in random:
        name, keys, position, has_gauss, gauss = random["numpy"]
        plain["numpy"] = [name, keys.tolist(), position, has_gauss, gauss]
    if plain:
        write_atomic(folder / "rng.json", json.dumps(plain) + "\n")
        bundle["random states (python, numpy)"] = "rng.json"
