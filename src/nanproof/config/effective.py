"""Which precision is in force in the end, over all sources at once.

The innermost word counts: an ``autocast`` in the code beats the tool around it, a trainer's flag beats accelerate's
config, an argument of ``Accelerator`` beats both the environment and the config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from . import sources
from .calls import Call, is_arguments
from .dialect import dialect_of
from .meaning import Meaning, is_on
from .project import Project
from .sources import Row
from .value import Settings

Stack = Literal["transformers", "accelerate", "DeepSpeed", "Lightning", "loop", "unknown"]
HALF = ("float16", "bfloat16")
_NO_LOSS_SCALER = {"StandardScaler", "MinMaxScaler", "RobustScaler", "MaxAbsScaler"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """What training computes in, and by whose word."""

    stack: Stack
    compute: str
    by: Row | None
    sure: bool
    """False when only running the code would tell."""
    scaler: bool | None
    weights: str
    trained: str
    """The format of the weights that the optimizer changes."""
    states: str
    lora: bool
    quantized: bool
    rows: tuple[Row, ...]

    @property
    def autocast(self) -> bool:
        """Whether half precision comes from autocast over weights in another format."""
        return self.compute in HALF and self.weights != self.compute


def find_effective(settings: Settings, project: Project) -> Effective:
    """Gather every source and decide."""
    meaning = Meaning.of(settings)
    project = project.with_codes(settings.codes)
    calls = project.calls
    rows = [
        *sources.flags(settings, meaning),
        *sources.tools(settings, meaning, calls),
        *sources.autocasts(settings, calls),
        *sources.scalers(calls, settings),
        *sources.weights(settings, meaning, calls),
    ]
    stack = _stack(settings, rows, calls)
    by, sure = _decide(stack, rows, bool(calls))
    if by is None and any(c.starred and is_arguments(c.name) for c in calls):
        sure = False  # TrainingArguments(**given): the flags may come from there
    loaded = next((r for r in rows if r.what == "weights" and r.dtype), None)
    weights = loaded.dtype or "float32" if loaded else "float32"
    if by is not None and by.what == "Lightning" and by.says.endswith("-true") and by.dtype in HALF:
        weights, loaded = by.dtype or weights, by
    if by is None and weights in HALF:
        by, sure = loaded, True
    compute = by.dtype or "float32" if by is not None else "float32"
    lora = _has_lora(meaning, calls)
    quantized = any(is_on(v) for v in meaning.all("load_in_4bit")) or any(c.name == "BitsAndBytesConfig" for c in calls)
    trained = "float32" if lora or _uses_deepspeed(settings, rows) else weights
    rows = [replace(r, effective=r is by or r is loaded) for r in rows]
    return Effective(
        stack=stack,
        compute=compute,
        by=next((r for r in rows if r.effective and r.what != "weights"), by),
        sure=sure,
        scaler=_scaler(stack, by, compute, rows, project),
        weights=weights,
        trained=trained,
        states=trained,
        lora=lora,
        quantized=quantized,
        rows=tuple(rows),
    )


def _stack(settings: Settings, rows: list[Row], calls: tuple[Call, ...]) -> Stack:
    names = {c.name for c in calls}
    if any(is_arguments(n) for n in names) or names & {"HfArgumentParser", "TrlParser"}:
        return "transformers"
    if dialect_of(v.key for v in settings) == "transformers":
        return "transformers"
    if any(r.what == "Lightning" for r in rows) and (
        not calls or any(c.name == "Trainer" and "lightning" in c.dotted.lower() for c in calls) or "Trainer" in names
    ):
        return "Lightning"
    if "Accelerator" in names:
        return "accelerate"
    if any(r.what == "DeepSpeed" for r in rows):
        return "DeepSpeed"
    if any(r.what == "accelerate" for r in rows) and not names & {"autocast", "GradScaler"}:
        return "accelerate"
    return "loop" if calls else "unknown"


def _decide(stack: Stack, rows: list[Row], code: bool) -> tuple[Row | None, bool]:
    """The row that counts, and whether that is sure."""

    def first(*whats: str, half: bool = True) -> Row | None:
        wanted = [r for r in rows if r.what in whats and r.dtype is not None and r.says != "enabled=False"]
        return next((r for r in [*(w for w in wanted if w.dtype in HALF), *([] if half else wanted)]), None)

    autocasts = [r for r in rows if r.what == "autocast"]
    live = first("autocast")
    if live is not None:
        return live, len({r.dtype for r in autocasts if r.dtype in HALF}) == 1
    sure = not any(r.dtype is None for r in autocasts)
    if (found := first("DeepSpeed", "FSDP")) is not None:
        return found, True
    if stack == "transformers":
        return first("trainer flag") or first("accelerate"), sure
    if stack == "accelerate":
        asked = [r for r in rows if r.what == "Accelerator"]
        if asked and asked[0].dtype is not None:
            return asked[0], sure
        # amp: true, and no code that says which format: an autocast inside of accelerate's would win
        open_flag = not code and any(r.what == "trainer flag" and r.dtype is None for r in rows)
        return first("accelerate"), sure and not asked and not open_flag
    if stack == "Lightning":
        return first("Lightning", half=False), sure
    if (found := first("trainer flag", "accelerate", "Lightning")) is not None:
        return found, not code and found.what != "trainer flag"
    return None, sure and not any(r.what == "trainer flag" and r.dtype is None for r in rows)


def _scaler(stack: Stack, by: Row | None, compute: str, rows: list[Row], project: Project) -> bool | None:
    if compute != "float16" or by is None:
        return any(r.what == "scaler" and r.says == "present" for r in rows)
    if any(r.what == "scaler" and r.says == "present" for r in rows):
        return True
    if by.what in ("DeepSpeed", "Accelerator", "accelerate") or (by.what == "trainer flag" and stack == "transformers"):
        return True
    if by.what == "Lightning":
        return not by.says.endswith("-true")
    if by.what == "weights":
        return False
    if any(r.what in ("Accelerator", "accelerate") and r.dtype == "float16" for r in rows):
        return True
    hints = {n for n in project.reads.mentioned if "scaler" in n.lower()} - _NO_LOSS_SCALER
    return None if hints or not project.codes else False


def _uses_deepspeed(settings: Settings, rows: list[Row]) -> bool:
    """DeepSpeed keeps an fp32 copy of the weights that it trains, whatever they were loaded in."""
    named = (v for v in settings if v.name in ("deepspeed", "deepspeed_config") and isinstance(v.value, str))
    return any(r.what == "DeepSpeed" and r.dtype != "float32" for r in rows) or any(v.value for v in named)


def _has_lora(meaning: Meaning, calls: tuple[Call, ...]) -> bool:
    if any(c.name in ("get_peft_model", "LoraConfig") for c in calls):
        return True
    return any(v.known and v.value not in (None, False, 0, "full", "no") for v in meaning.all("lora"))
