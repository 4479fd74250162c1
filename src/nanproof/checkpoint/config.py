"""What a checkpoint would restore, against what a config file says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FormatError, UsageError
from .report import Settings

MAX_BYTES = 4 << 20
MAX_NODES = 100_000
MAX_DEPTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting that a checkpoint would restore otherwise than configured."""

    setting: str
    checkpoint: float
    config: float
    key: str
    """The dotted key in the config file."""

    def __str__(self) -> str:
        return f"checkpoint will restore {self.setting} {self.checkpoint:.4g}, config says {self.config:g} ({self.key})"


# setting: what it is called in the checkpoint's settings, and by which keys configs know it
_KEYS = {
    "lr": ("initial_lr base_lr max_lr lr", r"(?:.*\.)?(?:lr|learning_rate|base_lr|max_lr|peak_lr)"),
    "beta1": ("beta1", r"(?:.*\.)?(?:adam_)?(?:beta1|betas\.0)"),
    "beta2": ("beta2", r"(?:.*\.)?(?:adam_)?(?:beta2|betas\.1)"),
    "eps": ("eps", r"(?:.*(?:optim|adam|train)\w*\.)?(?:eps|adam_epsilon|adam_eps|epsilon)"),
    "warm-up": ("warmup", r"(?:.*\.)?(?:num_)?warm_?up(?:_steps|_iters|_epochs)?"),
}


def load_config(path: str) -> dict[str, float]:
    """The numbers of a YAML or JSON file by dotted key; a file that unfolds without end is refused."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is too large for a config", hint="give the config file of the run")
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="give a YAML or JSON file") from None
    data = _parse(path, text)
    if not isinstance(data, dict):
        raise FormatError(f"{path} is not a mapping of keys to values", hint="give the config file of the run")
    return dict(_numbers(path, data))


def _parse(path: str, text: str) -> Any:
    if path.endswith(".json"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path} is not JSON: {error}", hint="correct it, or give another file") from None
    import yaml

    try:
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):  # events only: nothing is built yet
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if count > MAX_NODES or depth > MAX_DEPTH:
                raise FormatError(f"{path} has too many or too deeply nested values", hint="give a plain config file")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FormatError(f"{path} is not YAML: {first}", hint="correct it, or give another file") from None


def _numbers(path: str, root: dict[Any, Any]) -> Iterator[tuple[str, float]]:
    count = 0
    stack: list[tuple[str, Any, int]] = [("", root, 0)]
    while stack:
        name, value, depth = stack.pop()
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH:  # aliases multiply what was small on disk
            raise FormatError(f"{path} unfolds to too many values", hint="give a config file without nested aliases")
        if isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            stack += [(f"{name}.{key}" if name else str(key), item, depth + 1) for key, item in pairs]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)
        elif isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
            yield name, float(value)  # YAML 1.1 takes 1e-4 for a word


def differences(settings: Settings, config: dict[str, float]) -> tuple[Difference, ...]:
    """Every setting on which both have a word and the words differ."""
    betas = settings.betas or ()
    known = {
        "initial_lr": settings.initial_lr,
        "base_lr": settings.base_lr,
        "lr": settings.lr,
        "max_lr": settings.max_lr,
        "eps": settings.eps,
        "beta1": betas[0] if betas and not settings.cycled else None,
        "beta2": betas[1] if len(betas) > 1 else None,
        "warmup": settings.warmup,
    }
    found = []
    for setting, (sources, pattern) in _KEYS.items():
        key = min((k for k in config if re.fullmatch(pattern, k.lower())), key=len, default=None)
        values = [v for s in sources.split() if (v := known[s]) is not None]
        if key is None or not values:
            continue
        expected = config[key]
        # the peak or base rate decides; the momentary one is what a schedule makes of it
        if all(abs(v - expected) > 1e-6 * max(abs(v), abs(expected)) for v in values):
            shown = settings.lr if setting == "lr" and settings.lr is not None else values[0]
            found.append(Difference(setting=setting, checkpoint=shown, config=expected, key=key))
    return tuple(found)
