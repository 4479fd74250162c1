"""The precision table: who says what, what counts in the end, and what each way out costs.

table = precision(load("train.py", "config.yaml", "accelerate.yaml"), hardware="V100", parameters=892_000_000)
print(table.verdict)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..floats import format_of
from .contradictions import Problem, find_problems
from .effective import HALF, Effective, Stack, find_effective
from .hardware import Hardware, find_hardware
from .meaning import Meaning
from .memory import WAYS, Bytes, bytes_of, show_bytes
from .project import Project
from .sources import Row
from .value import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way out: what to set, what it costs."""

    name: str
    how: str
    possible: bool
    memory: str
    """Per parameter, and in all when the number of parameters is known."""
    change: int | None
    """Bytes more (or less) than now; None without a parameter count."""
    speed: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionTable:
    """All of it, as data; ``ok`` when nothing contradicts."""

    rows: tuple[Row, ...]
    compute: str
    weights: str
    states: str
    scaler: bool | None
    sure: bool
    verdict: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    ways: tuple[Way, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def precision(
    settings: Settings,
    hardware: str | None = None,
    parameters: int | None = None,
    *,
    trainable: int | None = None,
    project: Project | None = None,
) -> PrecisionTable:
    """Every source of precision in one table, with a verdict."""
    known = project or Project()
    if hardware is not None:
        known = replace(known, facts={**known.facts, "gpu": hardware})
    found = find_effective(settings, known)
    machine = find_hardware(known.fact("gpu"))
    meaning = Meaning.of(settings)
    problems = find_problems(found, meaning, known)
    return PrecisionTable(
        rows=(*found.rows, *_ends(found, machine, known)),
        compute=found.compute,
        weights=found.weights,
        states=found.states,
        scaler=found.scaler,
        sure=found.sure,
        problems=tuple(f"{p.message} ({p.code})" for p in problems),
        notes=tuple(_notes(found, machine, meaning)),
        verdict=_verdict(found, problems),
        ways=tuple(_ways(found, machine, parameters, trainable)),
    )


def _ends(found: Effective, machine: Hardware | None, project: Project) -> Iterator[Row]:
    """The rows that are concluded rather than read."""
    where = found.by.where if found.by is not None else "nothing asks for another"
    yield Row(what="optimizer states", setting="", says="follow the trained weights", dtype=found.states, where="")
    if project.fact("gpu"):
        has = "unknown" if machine is None else f"bf16 {'yes' if machine.bf16 else 'no'}"
        name = machine.name if machine else project.fact("gpu")
        yield Row(what="hardware", setting=name, says=has, dtype=None, where="", note=machine.note if machine else "")
    sure = "" if found.sure else "as far as the files tell"
    yield Row(
        what="compute", setting="", says="in the end", dtype=found.compute, where=where, effective=True, note=sure
    )


def _verdict(found: Effective, problems: tuple[Problem, ...]) -> str:
    if problems:
        return "; ".join(p.message for p in problems)
    scaler = {True: ", with a loss scaler", False: "", None: ", loss scaler unknown"}[found.scaler]
    scaler = scaler if found.compute == "float16" else ""
    how = "under autocast" if found.autocast else "throughout"
    sure = "" if found.sure else " (as far as the files tell)"
    return f"consistent{sure}: weights {found.weights}, computing in {found.compute} {how}{scaler}"


def _notes(found: Effective, machine: Hardware | None, meaning: Meaning) -> Iterator[str]:
    """What is no contradiction and still worth knowing."""
    lr = meaning.number("lr")
    if found.trained == "bfloat16" and lr is not None and 0 < lr < 1:
        form = format_of("bfloat16")
        lost = 2.0 ** (math.floor(math.log2(lr)) + 2 + form.mantissa_bits)  # there lr is below half a unit
        yield (
            f"weights are bfloat16 without an fp32 copy: a step of lr {lr:g} is lost on every weight "
            f"of magnitude {lost:.2g} and more (8 bits of significand); keep master weights in fp32"
        )
    if found.compute == "bfloat16" and any(r.what == "scaler" and r.says == "present" for r in found.rows):
        yield "the GradScaler has nothing to do: bfloat16 has the range of float32"
    if found.compute == "float16" and found.weights == "float16" and (found.lora or found.quantized):
        yield "the frozen weights compute in float16: activations above 65504 overflow; bfloat16 does not"
    if found.compute == "float16" and found.scaler:
        yield "float16 overflows above 65504 and loses what is below 6e-08; the scaler protects gradients only"
    if machine is not None and machine.note and found.compute in HALF:
        yield f"{machine.name}: {machine.note}"


_HOW: dict[Stack, dict[str, str]] = {
    "transformers": {
        "bf16": "bf16=True, fp16=False; load with dtype=torch.float32",
        "fp32": "bf16=False, fp16=False; load with dtype=torch.float32",
        "fp16 + scaler": "fp16=True, bf16=False; load with dtype=torch.float32",
    },
    "accelerate": {
        "bf16": 'mixed_precision="bf16"',
        "fp32": 'mixed_precision="no"',
        "fp16 + scaler": 'mixed_precision="fp16"',
    },
    "DeepSpeed": {
        "bf16": "bf16.enabled: true, fp16.enabled: false",
        "fp32": "both fp16.enabled and bf16.enabled: false",
        "fp16 + scaler": "fp16.enabled: true, fp16.loss_scale: 0 (dynamic)",
    },
    "Lightning": {"bf16": 'precision="bf16-mixed"', "fp32": "precision=32", "fp16 + scaler": 'precision="16-mixed"'},
    "loop": {
        "bf16": "autocast(device, dtype=torch.bfloat16), no scaler",
        "fp32": "no autocast, no .half()",
        "fp16 + scaler": "autocast(device, dtype=torch.float16) and GradScaler with unscale_ before clipping",
    },
}


def _ways(found: Effective, machine: Hardware | None, parameters: int | None, trainable: int | None) -> Iterator[Way]:
    now = _current(found)
    own = found.stack not in _HOW or (found.by is not None and found.by.what == "autocast")
    stack: Stack = "loop" if own else found.stack
    kinds = {"bf16": "bf16 autocast", "fp32": "fp32", "fp16 + scaler": "fp16 autocast + scaler"}
    for name, kind in kinds.items():
        way = WAYS["16-bit weights + fp32 master"] if stack == "DeepSpeed" and name != "fp32" else WAYS[kind]
        memory, change = str(way), None
        if parameters is not None:
            total = bytes_of(way, parameters, trainable)
            change = total - bytes_of(now, parameters, trainable)
            memory = f"{show_bytes(total)} ({way})"
        possible = machine is None or (machine.bf16 if name == "bf16" else machine.fp16 if name != "fp32" else True)
        yield Way(
            name=name,
            how=_HOW[stack][name],
            possible=possible,
            memory=memory,
            change=change,
            speed=_speed(name, machine),
            note=_doubt(name, machine, possible),
        )


def _current(found: Effective) -> Bytes:
    if found.by is not None and found.by.what == "DeepSpeed":
        return WAYS["16-bit weights + fp32 master"]
    if found.weights in HALF and not found.lora:
        return WAYS["bf16 weights"]
    return WAYS["bf16 autocast"] if found.compute in HALF else WAYS["fp32"]


def _doubt(name: str, machine: Hardware | None, possible: bool) -> str:
    if not possible and machine is not None:
        return f"{machine.name} does not compute in it"
    if name == "fp32":
        return "activations come on top, up to twice those in 16 bits"
    return "needs Ampere (sm80) or later" if name == "bf16" and machine is None else ""


def _speed(name: str, machine: Hardware | None) -> str:
    if machine is None or machine.peak_half is None or machine.peak_fp32 is None:
        basis = "the hardware is not known" if machine is None else "no peak figures for it here"
        words = "slowest" if name == "fp32" else "matrix products at the tensor-core rate"
        return f"{words} ({basis})"
    if name != "fp32":
        return f"matrix products at up to {machine.peak_half:g} Tflop/s (vendor's dense peak)"
    slower = machine.peak_half / machine.peak_fp32
    words = f"matrix products up to {slower:.0f}x slower ({machine.peak_fp32:g} Tflop/s, vendor's peak)"
    if machine.peak_tf32 is not None:
        words += f"; with TF32 allowed, up to {machine.peak_half / machine.peak_tf32:.0f}x"
    return words
