"""Reading a plan: everything that is wrong with it is said before anything runs."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...files import file_bytes
from .plan import Fallback, Gates, Limit, Plan, Stage, Target

LARGEST = 1 << 20  # bytes of a plan
_LIMIT = re.compile(r"\s*([\w.*/\-\[\]]+)\s*(<=|>=|<|>)\s*([-+.\deE]+)\s*")


def load_plan(path: str | Path, out: str | Path | None = None) -> Plan:
    """Read a plan; unknown keys, wrong types and gates that can never open are refused, with the stage named."""
    import yaml

    file = Path(path)
    try:
        if file.stat().st_size > LARGEST:
            raise UsageError(f"{path} is too large for a plan", hint="give a plan as nanproof rollout --init writes it")
        raw = file_bytes(file)
        data = yaml.safe_load(raw)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", hint="nanproof rollout --init writes one"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        told = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path} is not YAML: {told}", hint="nanproof rollout --init writes one to start from"
        ) from None
    top = _keys(data, "the plan", {"name", "stages", "overrides", "out"})
    stages = top.get("stages")
    if not isinstance(stages, list) or not stages:
        raise UsageError("the plan has no stages", hint="write stages: with a list of name, command, gates")
    style = top.get("overrides", "dotted")
    if style not in ("dotted", "flags"):
        raise UsageError(f"overrides is {style!r}", hint="write dotted (key=value) or flags (--key value)")
    name = str(top.get("name", file.stem))
    folder = file.absolute().parent
    plan = Plan(
        name=name,
        stages=tuple(_stage(s, i) for i, s in enumerate(stages)),
        folder=folder,
        style=style,
        out=Path(out) if out else folder / str(top.get("out", f"runs/{name}")),
        digest=hashlib.sha256(raw).hexdigest(),
    )
    names = [s.name for s in plan.stages]
    if len(set(names)) < len(names):
        raise UsageError("two stages have the same name", hint="give each its own")
    return plan


def _stage(data: Any, number: int) -> Stage:
    where = f"stage {number + 1}"
    given = _keys(data, where, {f.name for f in fields(Stage)})
    where = f"stage {given.get('name', number + 1)!r}"
    if not isinstance(given.get("command"), str) or not given["command"].strip():
        raise UsageError(f"{where} has no command", hint="write command: python train.py …")
    steps = _number(given.get("steps"), f"steps of {where}", int, lowest=1)
    return Stage(
        name=str(given.get("name", f"stage {number + 1}")),
        command=given["command"],
        env=_words(given.get("env"), f"env of {where}"),
        set=_words(given.get("set"), f"set of {where}"),
        steps=steps,
        minutes=_number(given.get("minutes", 60.0), f"minutes of {where}", float, lowest=1e-3) or 60.0,
        log=str(given.get("log", "{run_dir}")),
        gates=_gates(given.get("gates"), where, steps),
        on_fail=_fallback(given.get("on_fail"), where),
    )


def _gates(data: Any, where: str, steps: int | None) -> Gates:
    if data is None:
        return Gates()
    given = _keys(data, f"gates of {where}", {f.name for f in fields(Gates)})
    loss = given.get("loss", "falling")
    if loss not in ("falling", None):
        raise UsageError(f"gate loss of {where} is {loss!r}", hint="write falling, or null; for a value use loss_below")
    band = given.get("grad_norm")
    if band is not None:
        if not isinstance(band, list) or len(band) != 2:
            raise UsageError(f"gate grad_norm of {where} is {band!r}", hint="write a band such as [0.001, 10]")
        low, high = (_number(v, f"grad_norm of {where}", float) or 0.0 for v in band)
        if low >= high:
            raise UsageError(
                f"gate grad_norm of {where} can never open: {low:g} is not below {high:g}", hint="swap them"
            )
        band = (low, high)
    return Gates(
        incidents=_number(given.get("incidents", 0), f"incidents of {where}", int, lowest=0),
        loss=loss,
        loss_below=_target(given.get("loss_below"), where, steps),
        grad_norm=band,
        watch=_limits(given.get("watch"), where),
    )


def _target(data: Any, where: str, steps: int | None) -> Target | None:
    if data is None:
        return None
    given = _keys(data, f"loss_below of {where}", {"value", "by"})
    value = _number(given.get("value"), f"loss_below of {where}", float)
    by = _number(given.get("by", steps), f"by of loss_below of {where}", int, lowest=1)
    if value is None or by is None:
        raise UsageError(f"loss_below of {where} needs a value and a step", hint="write {value: 5.0, by: 500}")
    if steps is not None and by > steps:
        raise UsageError(
            f"gate loss_below of {where} can never open: it asks at step {by}, the stage ends at {steps}",
            hint="lower by, or raise steps",
        )
    return Target(value=value, by=by)


def _limits(data: Any, where: str) -> tuple[Limit, ...]:
    limits = tuple(_limit(w, where) for w in _list(data))
    for a, b in itertools.permutations(limits, 2):
        closed = a.sign == "<=" and b.sign == ">=" and a.value == b.value  # exactly one value is left
        if a.name == b.name and a.sign[0] == "<" and b.sign[0] == ">" and a.value <= b.value and not closed:
            raise UsageError(f"gates {a} and {b} of {where} can never both open", hint="look at the two numbers")
    return limits


def _limit(text: Any, where: str) -> Limit:
    match = _LIMIT.fullmatch(text) if isinstance(text, str) else None
    try:
        assert match is not None
        return Limit(name=match[1], sign=match[2], value=float(match[3]))
    except (AssertionError, ValueError):
        raise UsageError(f"watch of {where} is {text!r}", hint="write a limit such as 'alpha<0.1'") from None


def _fallback(data: Any, where: str) -> Fallback | None:
    if data is None:
        return None
    given = _keys(data, f"on_fail of {where}", {f.name for f in fields(Fallback)})
    return Fallback(
        set=_words(given.get("set"), f"on_fail.set of {where}"),
        env=_words(given.get("env"), f"on_fail.env of {where}"),
        retry=_number(given.get("retry", 1), f"retry of {where}", int, lowest=1) or 1,
    )


def _keys(data: Any, where: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(f"{where} is no mapping of keys to values", hint=f"write {', '.join(sorted(known))}")
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"it takes {', '.join(sorted(known))}"
            raise UsageError(f"{where} has an unknown key {key!r}", hint=meant)
    return data


def _words(data: Any, where: str) -> dict[str, str]:
    if data is None:
        return {}
    if not isinstance(data, dict) or any(isinstance(v, dict | list) for v in data.values()):
        raise UsageError(f"{where} is no list of keys and values", hint="write {key: value}")
    return {str(k): f"{v:g}" if isinstance(v, float) else str(v) for k, v in data.items()}


def _list(data: Any) -> list[Any]:
    return data if isinstance(data, list) else [] if data is None else [data]


def _number(data: Any, where: str, kind: type, lowest: float | None = None) -> Any:
    """A number; 1e-4 is text to YAML, and a number to everybody else."""
    if data is None:
        return None
    try:
        if isinstance(data, bool):
            raise ValueError
        value = kind(data)
        if value != float(data) or (lowest is not None and value < lowest):
            raise ValueError
    except (TypeError, ValueError):
        least = f" of at least {lowest:g}" if lowest is not None else ""
        raise UsageError(f"{where} is {data!r}", hint=f"give a number{least}") from None
    return value
