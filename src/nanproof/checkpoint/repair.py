"""A repaired copy of a checkpoint whose weights are whole. The original is not touched, and no weight is invented.

What can be made again without training is made again: BatchNorm statistics (reset as ``reset_running_stats``
does, or taken from a reference), an EMA (restarted from its parameter, or taken from a reference), the moments
of a parameter (back to the zeros they began with), the loss scale (back to 2^16). All other bytes are copied.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

from .. import files
from ..errors import UsageError
from .against import opened
from .contents import Contents, Stored, element
from .layout import Checkpoint
from .part import Part, open_part
from .patch import Patch, copy_patched
from .report import ScanReport, TensorReport
from .roles import BATCHNORM, MOMENTS, last
from .scan import plan
from .source import Source, read
from .tree import dicts

FRESH_SCALE = 65536.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What a repair did, or why it did nothing."""

    source: str
    target: str
    done: tuple[str, ...] = ()
    refused: str = ""


@dataclass(slots=True)
class _Plan:
    patches: dict[str, list[Patch]] = field(default_factory=dict)
    zips: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    hopeless: list[str] = field(default_factory=list)


def repair(
    checkpoint: Checkpoint, report: ScanReport, target: str | os.PathLike[str], reference: Checkpoint | None = None
) -> Repair:
    """Write a repaired copy of ``checkpoint`` to ``target``, which must not exist yet."""
    if os.path.lexists(target):
        raise UsageError(f"{os.fspath(target)} exists already", hint="choose another name for the repaired copy")
    where = os.fspath(target)
    if report.health != "corrupt":
        words = {"healthy": "it is healthy", "suspect": "it is finite"}.get(report.health, f"it is {report.health}")
        return Repair(
            source=checkpoint.path, target=where, refused=f"{words}: there is nothing here that a repair can do"
        )
    todo = _decide(checkpoint, report, reference)
    if todo.hopeless:
        more = f" and {len(todo.hopeless) - 1} more" if len(todo.hopeless) > 1 else ""
        why = f"{todo.hopeless[0]}{more}; go back to a healthy checkpoint"
        return Repair(source=checkpoint.path, target=where, refused=why)
    _write(checkpoint, todo, Path(target))
    return Repair(source=checkpoint.path, target=where, done=tuple(todo.done))


def _write(checkpoint: Checkpoint, todo: _Plan, target: Path) -> None:
    if len(checkpoint.items) == 1 and checkpoint.items[0].path == checkpoint.path:
        _copy(checkpoint, checkpoint.path, target, todo)
        return
    with files.atomic_folder(target) as folder:
        for item in checkpoint.items:
            place = folder / item.name
            files.make_folder(place.parent)
            _copy(checkpoint, item.path, place, todo)


def _copy(checkpoint: Checkpoint, path: str, target: Path, todo: _Plan) -> None:
    source = checkpoint.store.open(path)
    try:
        with files.atomic_file(target) as file:
            copy_patched(source, file, todo.patches.get(path, []), todo.zips.get(path, []))
    finally:
        source.close()


def _decide(checkpoint: Checkpoint, report: ScanReport, reference: Checkpoint | None) -> _Plan:
    todo = _Plan()
    bad = {(t.file, t.name): t for t in report.bad}
    for part in plan(checkpoint)[0]:
        source = checkpoint.store.open(part.path)
        try:
            contents = open_part(source, part, check=False)
            patches = todo.patches.setdefault(part.path, [])
            todo.zips[part.path] = _zips(source, contents, part)
            mine = {t.name: t for t in contents.tensors}
            groups = {_group(t) for (file, _), t in bad.items() if file == part.file}
            for kind, prefix in sorted(groups):
                _fix_group(kind, prefix, mine, source, patches, todo, reference)
            _fix_scale(contents, part, patches, todo)
        finally:
            source.close()
    return todo


def _zips(source: Source, contents: Contents, part: Part) -> list[tuple[int, int]]:
    """The zip files in a file: itself, or the blobs of a DCP file."""
    if part.entries is not None:
        return [(e.at, e.length) for e in part.entries if read(source, e.at, min(4, e.length)) == b"PK\3\4"]
    return [(0, source.size)] if contents.format == "torch zip" else []


def _group(tensor: TensorReport) -> tuple[str, str]:
    """What is repaired together: all statistics of a BatchNorm, all moments of a parameter, one EMA tensor."""
    word = last(tensor.name)
    prefix = tensor.name.partition("@")[0].removesuffix(word)
    if word in BATCHNORM:
        return "batchnorm", prefix
    if tensor.role == "moment" and word in MOMENTS:
        return "moments", prefix
    return ("ema", tensor.name) if tensor.role == "ema" else ("lost", tensor.name)


def _fix_group(
    kind: str,
    prefix: str,
    mine: dict[str, Stored],
    source: Source,
    patches: list[Patch],
    todo: _Plan,
    reference: Checkpoint | None,
) -> None:
    if kind == "lost":
        todo.hopeless.append(f"{prefix} is lost, and only training can make it")
        return
    words = (*MOMENTS, "step") if kind == "moments" else BATCHNORM
    chosen = [mine[prefix]] if kind == "ema" else [s for s in mine.values() if _belongs(s, prefix, words)]
    if any(s.stride is not None or s.inline is not None for s in chosen):
        todo.hopeless.append(f"{prefix} is stored as a view with strides, which cannot be rewritten in place")
        return
    if kind != "moments" and reference is not None:
        taken = _take(chosen, reference)
        if taken is not None:
            patches += taken
            todo.done.append(f"{_shown(chosen)}: taken from {reference.name}")
            return
    if kind == "ema":
        _restart_ema(chosen[0], mine, source, patches, todo)
        return
    for stored in chosen:
        one = last(stored.name) == "running_var"
        patches.append(Patch(stored.start, stored.nbytes, _code(stored.dtype, 1.0 if one else 0.0)))
    said = "mean 0, variance 1, count 0" if kind == "batchnorm" else "back to zero, as a fresh optimizer has them"
    counted = kind == "batchnorm" or any(last(s.name) == "step" for s in chosen)
    todo.done.append(f"{_shown(chosen)}: {said}{'' if counted else '; its step count stays'}")


def _belongs(stored: Stored, prefix: str, words: tuple[str, ...]) -> bool:
    name = stored.name.partition("@")[0]
    return name.startswith(prefix) and name[len(prefix) :] in words


def _shown(chosen: list[Stored]) -> str:
    names = [s.name for s in chosen]
    return names[0] if len(names) == 1 else f"{names[0]} and {', '.join(last(n) for n in names[1:])}"


def _take(chosen: list[Stored], reference: Checkpoint) -> list[Patch] | None:
    """The same tensors from the reference, if it has them all, whole and finite."""
    from .detail import look

    with opened(reference) as old:
        patches = []
        for stored in chosen:
            found = old.get(stored.name)
            if found is None or (found[1].shape, found[1].dtype) != (stored.shape, stored.dtype) or found[1].stride:
                return None
            kind = element(found[1].dtype)
            if kind is not None and kind.format is not None and look(found[0], found[1], stored.name).bad:
                return None
            patches.append(Patch(stored.start, stored.nbytes, read(found[0], found[1].start, found[1].nbytes)))
        return patches


def _restart_ema(ema: Stored, mine: dict[str, Stored], source: Source, patches: list[Patch], todo: _Plan) -> None:
    """An average that is lost begins again at the present value of what it averages."""
    from .detail import look

    tail = re.split(r"(?i)(?:^|[._/])(?:ema|shadow|averaged?)\w*?[._/]", ema.name)[-1]
    alike = (ema.shape, ema.dtype, None, None)
    for stored in mine.values():
        named = stored is not ema and re.search(rf"(?:^|\.){re.escape(tail)}$", stored.name)
        if not named or (stored.shape, stored.dtype, stored.stride, stored.inline) != alike:
            continue
        if not look(source, stored, stored.name).bad:
            patches.append(Patch(ema.start, ema.nbytes, read(source, stored.start, stored.nbytes)))
            todo.done.append(f"{ema.name}: restarted from {stored.name}")
            return
    todo.hopeless.append(f"{ema.name} has no finite parameter to restart from (give --against a healthy checkpoint)")


def _fix_scale(contents: Contents, part: Part, patches: list[Patch], todo: _Plan) -> None:
    base = next(iter(contents.patchable.values()), None)
    for _, d in dicts(contents.tree) if base is not None else ():
        scale = d.get("scale")
        if "growth_factor" in d and isinstance(scale, float) and not (math.isfinite(scale) and scale >= 1e-3):
            at = getattr(scale, "at", None)
            if at is not None and base is not None:
                patches.append(Patch(base + at, 8, struct.pack(">d", FRESH_SCALE)))
                todo.done.append(f"loss scale: {float(scale):g} → {FRESH_SCALE:g} in {part.file}")


def _code(dtype: str, value: float) -> bytes:
    """The bytes of 0 or 1 in a dtype."""
    kind = element(dtype)
    if kind is None or kind.format is None:
        return bytes(max(kind.bits if kind else 8, 8) // 8)
    code = kind.format.bias << kind.format.mantissa_bits if value else 0
    return code.to_bytes(kind.format.storage.itemsize, "little")
