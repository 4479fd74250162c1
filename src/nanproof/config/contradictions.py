"""Where the sources of precision contradict each other, or agree on something that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .effective import HALF, Effective
from .hardware import find_hardware
from .meaning import Meaning
from .project import Project
from .sources import Row
from .value import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One contradiction; ``value`` is the setting to point at."""

    code: Literal["NP701", "NP702"]
    message: str
    help: str
    value: Value | None
    where: str


def find_problems(found: Effective, meaning: Meaning, project: Project) -> tuple[Problem, ...]:
    """Every contradiction, the gravest first."""
    return (
        *_both_at_once(found),
        *_autocast_without_scaler(found),
        *_overridden(found),
        *_unsupported(found, project),
        *_fp16_weights(found, meaning),
    )


def _both_at_once(found: Effective) -> Iterator[Problem]:
    for what in ("trainer flag", "DeepSpeed"):
        on = {r.dtype: r for r in found.rows if r.what == what and r.dtype in HALF}
        if len(on) == 2 and _section(on["float16"]) == _section(on["bfloat16"]):
            row, other = on["float16"], on["bfloat16"]
            yield Problem(
                code="NP701",
                message=f"{row.setting} and {other.setting} ({other.where}) are both on",
                help="keep bf16 on hardware that has it (Ampere and later), else fp16",
                value=row.value,
                where=row.where,
            )
    flag = next((r for r in found.rows if r.what == "trainer flag" and r.dtype in HALF), None)
    tool = next((r for r in found.rows if r.what == "DeepSpeed" and r.dtype in HALF), None)
    if flag and tool and flag.dtype != tool.dtype:
        yield Problem(
            code="NP701",
            value=tool.value,
            where=tool.where,
            message=f"{flag.setting} is on ({flag.where}), DeepSpeed has {tool.setting} on ({tool.where})",
            help=f'write "auto" in the DeepSpeed config, or switch {tool.setting} off',
        )


def _section(row: Row) -> str:
    return (
        row.setting.rpartition(".")[0].rpartition(".")[0] if row.what == "DeepSpeed" else row.setting.rpartition(".")[0]
    )


def _autocast_without_scaler(found: Effective) -> Iterator[Problem]:
    row = found.by
    if row is None or row.what != "autocast" or row.dtype != "float16" or found.scaler is not False or not found.sure:
        return
    if row.value is None and not any(r.dtype == "bfloat16" for r in found.rows):
        return  # code alone: that is the business of lint's NP308
    meant = next((r for r in found.rows if r.dtype == "bfloat16" and r is not row), None)
    flag = f"{row.value.name}: {row.value.text or row.value.value} reaches autocast" if row.value else "autocast runs"
    default = ", whose default on cuda is float16" if row.says == "default" else " with float16"
    over = f"; {meant.says} of {meant.where} is overridden there" if meant else ""
    yield Problem(
        code="NP701",
        message=f"{flag} at {row.where}{default}, and no GradScaler was found{over}",
        help="give autocast dtype=torch.bfloat16, or add a GradScaler",
        value=row.value,
        where=row.where,
    )


def _overridden(found: Effective) -> Iterator[Problem]:
    tool = next((r for r in found.rows if r.what == "accelerate" and r.dtype in HALF), None)
    if tool is None or found.by is None or not found.sure or found.by.what in ("accelerate", "DeepSpeed"):
        return
    if found.compute == tool.dtype or (found.by.what == "autocast" and found.scaler is False):
        return
    places = {r.where.rpartition(":")[0] for r in found.rows if r.what in ("autocast", "Accelerator")}
    if len(places) > 1:
        return  # several programs: nobody knows which one this config is for
    yield Problem(
        code="NP701",
        value=tool.value,
        where=tool.where,
        message=f"mixed_precision: {tool.says} is overridden by {found.by.setting} at {found.by.where}: "
        f"training computes in {found.compute}",
        help="say it in one place only",
    )


def _unsupported(found: Effective, project: Project) -> Iterator[Problem]:
    hardware = find_hardware(project.fact("gpu"))
    if hardware is None or found.by is None:
        return
    if found.compute == "bfloat16" and not hardware.bf16:
        yield Problem(
            code="NP701",
            message=f"{found.by.setting} asks for bfloat16, which {hardware.name} does not have",
            help="use float32, or float16 with a loss scaler",
            value=found.by.value,
            where=found.by.where,
        )
    if found.compute == "float16" and not hardware.fp16:
        yield Problem(
            code="NP701",
            message=f"{found.by.setting} asks for float16, which {hardware.name} does not compute in",
            help="use bfloat16" if hardware.bf16 else "use float32",
            value=found.by.value,
            where=found.by.where,
        )


def _fp16_weights(found: Effective, meaning: Meaning) -> Iterator[Problem]:
    row = next(
        (r for r in found.rows if r.effective and r.dtype == "float16" and r.what in ("weights", "Lightning")), None
    )
    if row is None or found.trained != "float16" or found.quantized or meaning.get("lr") is None:
        return
    under = f" under fp16 autocast ({found.by.where})" if found.by is not None and found.by.what != "weights" else ""
    yield Problem(
        code="NP702",
        value=row.value,
        where=row.where,
        message=f"{row.setting}: {row.says} makes the trained weights themselves float16{under}: no fp32 master copy",
        help="load in float32 and let autocast compute in half precision, or use bfloat16",
    )
