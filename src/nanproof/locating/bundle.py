"""An incident's folder, read back: enough of a bad step to replay it in another process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import UsageError
from ..files import file_text
from ..records import Incident
from ..rng import set_random_states
from .incidents import read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What an incident kept."""

    incident: Incident
    batch: Any
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random: dict[str, Any]

    def set_up(self, model: nn.Module) -> None:
        """Give a model the weights and buffers of the bad step, and this process its random states."""
        own = dict(model.state_dict())
        kept = {**self.weights, **{k: v for k, v in self.buffers.items() if k in own}}
        missing = sorted(set(dict(model.named_parameters())) - set(kept))
        strange = sorted(set(self.weights) - set(own))
        if strange or (missing and self.weights):
            raise UsageError(
                f"this is not the model of the incident: {(strange or missing)[0]} is only in one of them",
                hint="build the model as the training script does",
            )
        model.load_state_dict(kept, strict=False)
        if self.random:
            set_random_states(_live_form(self.random))


def read_bundle(folder: Path) -> Bundle:
    """Read an incident's folder; nothing in it is executed."""
    incident = read_record(folder)
    tensors = _tensors(folder / "batch.safetensors")
    outline = folder / "batch.json"
    batch = _rebuild(json.loads(file_text(outline)), tensors) if outline.is_file() else None
    random: dict[str, Any] = dict(_tensors(folder / "rng.safetensors"))
    plain = folder / "rng.json"
    random |= json.loads(file_text(plain)) if plain.is_file() else {}
    weights, buffers = _tensors(folder / "weights.safetensors"), _tensors(folder / "buffers.safetensors")
    return Bundle(incident=incident, batch=batch, weights=weights, buffers=buffers, random=random)


def _live_form(states: dict[str, Any]) -> dict[str, Any]:
    """Random states as the generators want them; JSON has neither tuples nor arrays."""
    live = dict(states)
    if "python" in live:
        version, numbers, gauss = live["python"]
        live["python"] = (version, tuple(numbers), gauss)
    if "numpy" in live:
        name, keys, *rest = live["numpy"]
        live["numpy"] = (name, np.array(keys, dtype=np.uint32), *rest)
    cuda = [live.pop(k) for k in sorted(k for k in live if k.startswith("cuda."))]
    return {**live, "cuda": cuda} if cuda else live


def _tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path) if path.is_file() else {}


def _rebuild(outline: Any, tensors: dict[str, Tensor]) -> Any:
    """The batch from its outline; objects of the user's own classes become plain namespaces."""
    if not isinstance(outline, dict):
        return outline
    if "tensor" in outline:
        return tensors.get(outline["tensor"])
    items = {k: _rebuild(v, tensors) for k, v in outline.get("items", {}).items()}
    if outline.get("kind") == "tuple":
        return tuple(items.values())
    if outline.get("kind") == "list":
        return list(items.values())
    return items if outline.get("kind") in ("dict", "BatchEncoding", "OrderedDict") else SimpleNamespace(**items)
