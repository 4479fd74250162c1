"""``run.json``: there from the start, so that anybody can see whether the run is guarded."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import file_text, make_folder, write_atomic
from ..launch import rank_and_world
from ..records import to_json

log = logging.getLogger("nanproof")


_VARIABLES = (
    "CUDA_",
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "CUBLAS_",
    "HF_",
    "ACCELERATE_",
    "DEEPSPEED_",
    "XLA_",
)
_LEFT_OUT = ("KEY", "TOKEN", "SECRET", "PASS", "TORCHELASTIC_")  # secrets, and what torchrun sets by itself
_PACKAGES = ("torch", "numpy", "transformers", "accelerate", "lightning", "deepspeed", "peft", "datasets")


def surroundings() -> dict[str, Any]:
    """What a later run is compared by: versions, devices, the seed, the environment variables that torch reads."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        if (module := sys.modules.get(name)) is not None:
            found[name] = str(getattr(module, "__version__", "unknown"))
    torch = sys.modules.get("torch")
    with suppress(Exception):  # torch may be half loaded, or its driver gone
        if torch is not None:
            found |= {"seed": str(torch.initial_seed()), "threads": str(torch.get_num_threads())}
            found["devices"] = "cpu"
            if torch.cuda.is_initialized():
                names = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
                found["devices"] = ", ".join(f"{n} × {name}" for name, n in names.items())
                found["cuda"] = str(torch.version.cuda)
    if (world := rank_and_world()[1]) > 1:
        found["ranks"] = str(world)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        found["launcher"] = "torchrun"
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not any(word in name for word in _LEFT_OUT)
    }
    return {"environment": found, "variables": variables}


class RunRecord:
    """One file, rewritten whole when something changes; a full disk costs the record, never the run."""

    def __init__(self) -> None:
        self._start = {
            "command": [sys.executable, *sys.orig_argv[1:]],
            "cwd": str(Path.cwd()),
            "pid": os.getpid(),
            "started": round(time.time(), 3),
        }

    def write(self, folder: Path, name: str, fields: Mapping[str, Any]) -> None:
        try:
            make_folder(folder)
            write_atomic(
                folder / name, json.dumps(to_json({**self._start, **fields, **surroundings()}), indent=1) + "\n"
            )
        except OSError as error:
            log.error("nanproof: %s was not written: %s", folder / name, error)

    def processes(self, folder: Path) -> list[dict[str, Any]]:
        """The records of the processes that this one has started, in the order of their start."""
        found = []
        for path in sorted([*folder.glob("run.r*.json"), *folder.glob("*/run.json")]):
            try:
                record = json.loads(file_text(path))
                if record["started"] >= self._start["started"]:
                    found.append(record)
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return sorted(found, key=lambda record: float(record["started"]))
