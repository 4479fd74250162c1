"""Everything that has a say on precision, each as one row with its place: flags, tools, autocast, scaler, weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..floats import find_format
from .calls import OPTIMIZERS, Call, is_arguments
from .link import follow
from .meaning import Meaning, is_on
from .value import Plain, Settings, Value

What = Literal[
    "trainer flag",
    "accelerate",
    "Accelerator",
    "DeepSpeed",
    "FSDP",
    "Lightning",
    "autocast",
    "scaler",
    "weights",
    "hardware",
    "optimizer states",
    "compute",
]

_WORDS = {
    "fp16": "float16",
    "16": "float16",
    "16-mixed": "float16",
    "16-true": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "bf16-mixed": "bfloat16",
    "bf16-true": "bfloat16",
    "no": "float32",
    "none": "float32",
    "32": "float32",
    "32-true": "float32",
    "fp32": "float32",
    "64": "float64",
    "64-true": "float64",
    "fp8": "float8",
    "tf32": "float32",
    "float": "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the precision table."""

    what: What
    setting: str
    says: str
    """As it is written."""
    dtype: str | None
    """What it means; None when that is open."""
    where: str
    note: str = ""
    effective: bool = False
    """Whether this is what counts in the end."""
    value: Value | None = None
    """The setting behind the row, if it is one."""


def dtype_of(value: Plain) -> str | None:
    """The float format that a word for a precision means.

    >>> dtype_of("bf16-mixed"), dtype_of(16), dtype_of("torch.float16"), dtype_of("auto")
    ('bfloat16', 'float16', 'float16', None)
    """
    word = str(value).lower().strip()
    if word in _WORDS:
        return _WORDS[word]
    form = find_format(word)
    return form.name if form is not None else None


def tool_of(value: Value) -> str:
    return value.key.partition(".")[0] if value.key.startswith(("accelerate.", "deepspeed.", "launch.")) else ""


def flags(settings: Settings, meaning: Meaning) -> Iterator[Row]:
    """``fp16: true``, ``--bf16``, ``amp: true``, ``mixed_precision: bf16``, ``precision: 16-mixed``."""
    for concept, dtype in (("fp16", "float16"), ("bf16", "bfloat16"), ("amp", None)):
        found = [v for v in meaning.all(concept) if not tool_of(v)]
        for value in found[:1]:
            word = dtype_of(value.value) if isinstance(value.value, str) else None
            switched = dtype if is_on(value) else word if word not in (None, "float32") else "float32"
            says = str(value.value) if value.known else value.text
            meant = switched if value.known else None
            if concept == "amp" and is_on(value):
                meant = None  # which format, only the code says
            yield Row(
                what="trainer flag",
                setting=value.key,
                says=says,
                dtype=meant,
                where=value.where,
                value=value,
                note=_story(settings, value),
            )
    for value in [v for v in meaning.all("mixed_precision") if not tool_of(v) and v.known][:1]:
        lightning = re.search(r"(^|\.)(trainer\.)?precision$", value.key.lower()) is not None
        if value.key.startswith("Accelerator."):
            continue
        meant = dtype_of(value.value) if not isinstance(value.value, bool) else None
        yield Row(
            what="Lightning" if lightning else "trainer flag",
            setting=value.key,
            says=str(value.value),
            dtype=meant,
            where=value.where,
            value=value,
            note=_story(settings, value),
        )


def tools(settings: Settings, meaning: Meaning, calls: tuple[Call, ...]) -> Iterator[Row]:
    """accelerate's config, DeepSpeed's sections, ``Accelerator(mixed_precision=…)``."""
    value = settings.get("accelerate.mixed_precision")
    if value is not None:
        yield Row(
            what="accelerate",
            setting="mixed_precision",
            says=str(value.value),
            dtype=dtype_of(value.value),
            where=value.where,
            value=value,
            note=_story(settings, value),
        )
    for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16")):
        value = settings.get(f"deepspeed.{name}.enabled")
        if value is not None:
            auto = str(value.value).lower() == "auto"
            meant = None if auto else dtype if is_on(value) else "float32"
            note = "taken over from the trainer's flag" if auto else ""
            yield Row(
                what="DeepSpeed",
                setting=f"{name}.enabled",
                says=str(value.value),
                dtype=meant,
                where=value.where,
                value=value,
                note=note,
            )
    for call in calls:
        dtype_asked = call.get("param_dtype") if call.name in ("MixedPrecision", "MixedPrecisionPolicy") else None
        if dtype_asked is not None and (reached := follow(dtype_asked, settings)) is not None:
            yield Row(
                what="FSDP",
                setting="param_dtype",
                says=dtype_asked.text,
                dtype=dtype_of(reached.value),
                where=call.where,
                value=reached.by or dtype_asked,
            )
        asked = call.get("mixed_precision") if call.name == "Accelerator" else None
        if asked is not None:
            reached = follow(asked, settings)
            meant = dtype_of(reached.value) if reached else None
            by = f"decided by {reached.by.key} ({reached.by.where})" if reached and reached.by else ""
            yield Row(
                what="Accelerator",
                setting="mixed_precision",
                says=asked.text,
                dtype=meant,
                where=call.where,
                note=by,
                value=reached.by if reached and reached.by else asked,
            )


def autocasts(settings: Settings, calls: tuple[Call, ...]) -> Iterator[Row]:
    """Every ``autocast`` of the code itself; without a dtype it is float16 on cuda and bfloat16 on cpu."""
    for call in calls:
        if call.name != "autocast" or "accelerator" in call.receiver.lower() or "fabric" in call.receiver.lower():
            continue
        asked = call.get("enabled")
        enabled = follow(asked or call.condition, settings)
        device = call.get("device_type")
        on_cpu = ".cpu." in call.dotted or (device is not None and device.known and str(device.value) == "cpu")
        dtype, says, note = _autocast_dtype(call, settings, on_cpu)
        if enabled is not None and not enabled.value:
            dtype, note = "float32", f"switched off by {enabled.by.where if enabled.by else 'the code'}"
        elif enabled is not None and enabled.by is not None:
            note = f"switched on by {enabled.by.key} ({enabled.by.where}); {note}".rstrip("; ")
        elif asked is not None and enabled is None:
            note = f"on when {asked.text} is; {note}".rstrip("; ")
        sure = asked is None or enabled is not None
        yield Row(
            what="autocast",
            setting="dtype",
            says=says,
            dtype=dtype if sure else None,
            where=call.where,
            note=note,
            value=enabled.by if enabled is not None else None,
        )


def _autocast_dtype(call: Call, settings: Settings, on_cpu: bool) -> tuple[str | None, str, str]:
    asked = call.get("dtype")
    if asked is not None:
        reached = follow(asked, settings)
        return (dtype_of(reached.value) if reached else None), asked.text, ""
    return ("bfloat16" if on_cpu else "float16"), "default", f"the default on {'cpu' if on_cpu else 'cuda'}"


def scalers(calls: tuple[Call, ...], settings: Settings) -> Iterator[Row]:
    for call in calls:
        if call.name in ("GradScaler", "ShardedGradScaler"):
            enabled = follow(call.get("enabled"), settings)
            off = call.get("enabled") is not None and enabled is not None and not enabled.value
            yield Row(
                what="scaler",
                setting=call.name,
                says="enabled=False" if off else "present",
                dtype=None,
                where=call.where,
                note="switched off: loss is not scaled" if off else "",
            )


def weights(settings: Settings, meaning: Meaning, calls: tuple[Call, ...]) -> Iterator[Row]:
    """The format in which the weights are loaded or cast, where the same file also trains."""
    training = {c.path for c in calls if c.name in OPTIMIZERS or is_arguments(c.name) or c.name in ("Trainer",)}
    seen_calls = False
    for call in calls:
        if call.path not in training:
            continue
        asked, dtype = None, None
        if call.name in ("from_pretrained", "from_config"):
            asked = call.get("torch_dtype") or call.get("dtype")
        elif call.name in ("to", "set_default_dtype"):
            asked = call.get("dtype") or call.get("d")
        elif call.name in ("half", "bfloat16"):
            dtype = "float16" if call.name == "half" else "bfloat16"
        if asked is None and dtype is None:
            continue
        seen_calls = True
        reached = follow(asked, settings)
        if reached is not None:
            dtype = dtype_of(reached.value)
        yield Row(
            what="weights",
            setting=f"{call.receiver}.{call.name}".removeprefix("."),
            says=asked.text if asked else f"{call.name}()",
            dtype=dtype,
            where=call.where,
            value=(reached.by if reached else None) or asked,
        )
    value = meaning.get("load_dtype")
    if value is not None and value.known and value.origin != "call" and not seen_calls:
        yield Row(
            what="weights",
            setting=value.key,
            says=str(value.value),
            dtype=dtype_of(value.value),
            where=value.where,
            value=value,
        )


def _story(settings: Settings, value: Value) -> str:
    """What this value overrode, if that was something else."""
    before = [v for v in settings.overridden(value.key) if v.value != value.value]
    return "; ".join(f"overrides {v.value} of {v.where}" for v in before)
