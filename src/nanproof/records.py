"""The frozen records that flow through nanproof.

>>> v = Verdict(kind="nonfinite", step=4102, level="gradient", names=("blocks.3.attn.qkv.weight",))
>>> v.ok, str(v)
(False, 'step 4,102: nonfinite gradient (blocks.3.attn.qkv.weight)')

Records know nothing of torch, files or terminals. Their JSON form is strict: NaN and ±Inf, which JSON has no
words for, are written as the strings "NaN", "Infinity" and "-Infinity", so that any parser can read them.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from .errors import FormatError

Kind = Literal["ok", "nonfinite", "overflow", "spike", "headroom", "dead", "guard-failed"]
Level = Literal["input", "prediction", "loss", "gradient", "parameter", "buffer", "activation", "guard"]
Origin = Literal["transient", "range", "data", "state", "scale"]
Step = Literal["commit", "skip", "rerun", "rollback", "restore", "stop"]

INCIDENT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one training step looked like, in host numbers."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    components: Mapping[str, float] = field(default_factory=dict)
    scale: float | None = None
    bad: tuple[str, ...] = ()
    """Levels at which something non-finite was seen, for example ("input", "loss")."""
    watched: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one step. ``verdict.ok`` is all that most loops need."""

    kind: Kind
    step: int
    level: Level | None = None
    names: tuple[str, ...] = ()
    """What is bad: loss components, parameters, batch items, modules."""
    value: float | None = None
    limit: float | None = None
    origin: Origin | None = None
    """Found by rerunning the step: transient, range (finite in fp32), data, state, scale (GradScaler)."""
    rank: int | None = None

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    def __str__(self) -> str:
        what = f" {self.level}" if self.level else ""
        names = f" ({', '.join(self.names[:3])}{' …' if len(self.names) > 3 else ''})" if self.names else ""
        value = f" {self.value:.4g}" if self.value is not None else ""
        limit = f" above {self.limit:.4g}" if self.limit is not None else ""
        rank = f" on rank {self.rank}" if self.rank is not None else ""
        origin = f", origin: {self.origin}" if self.origin else ""
        return f"step {self.step:,}: {self.kind}{what}{value}{limit}{names}{rank}{origin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the policy decided to do about a verdict, and why."""

    kind: Step
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """The statistics of one tensor that was looked at closely."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    finite_min: float | None = None
    finite_max: float | None = None
    first_bad: tuple[int, ...] | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        return self.nan + self.posinf + self.neginf

    @property
    def census(self) -> str:
        """What is bad, in words.

        >>> TensorFacts(name="w", shape=(2, 3), dtype="float32", nan=1, first_bad=(0, 1)).census
        '1 NaN of 6 values, first at [0, 1] (float32)'
        """
        kinds = ((self.nan, "NaN"), (self.posinf, "+Inf"), (self.neginf, "-Inf"))
        found = ", ".join(f"{n:,} {kind}" for n, kind in kinds if n) or "nothing bad"
        first = f", first at {list(self.first_bad)}" if self.first_bad is not None else ""
        return f"{found} of {math.prod(self.shape):,} values{first} ({self.dtype})"

    def __str__(self) -> str:
        counts = [f"{n:,} {word}" for n, word in ((self.nan, "NaN"), (self.posinf, "+Inf"), (self.neginf, "-Inf")) if n]
        total = math.prod(self.shape)
        state = f"{' + '.join(counts)} of {total:,}" if counts else f"all {total:,} finite"
        span = f", finite {self.finite_min:.4g} … {self.finite_max:.4g}" if self.finite_min is not None else ""
        zero = f", {self.zero:,} zero" if self.zero else ""
        extra = "".join(f", {k}={v:.4g}" for k, v in self.extra.items())
        return f"{self.name} {list(self.shape)} {self.dtype}: {state}{zero}{span}{extra}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A bad step as it is kept on disk, complete enough to be replayed elsewhere.

    ``unknown`` holds fields written by a later minor version; they survive a round trip.
    """

    id: str
    step: int
    time: str
    rank: int
    world_size: int
    verdict: Verdict
    action: Action
    tensors: tuple[TensorFacts, ...] = ()
    taps: tuple[TensorFacts, ...] = ()
    readings: tuple[Reading, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    bundle: Mapping[str, str] = field(default_factory=dict)
    """Files beside this record: what each is, and its name."""
    notes: tuple[str, ...] = ()
    location: Mapping[str, Any] | None = None
    version: int = INCIDENT_VERSION
    unknown: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A strict-JSON dictionary that follows the published schema."""
        plain = to_json(self)
        assert isinstance(plain, dict)
        unknown: dict[str, Any] = plain.pop("unknown")
        return unknown | plain

    @classmethod
    def from_json(cls, data: object) -> Incident:
        """The incident behind a parsed JSON document."""
        if not isinstance(data, dict) or "version" not in data or "verdict" not in data:
            raise FormatError(
                "this is not an incident record", hint="give the incident.json of a run's incidents folder"
            )
        if not isinstance(data["version"], int) or data["version"] > INCIDENT_VERSION:
            raise FormatError(
                f"this incident has schema version {data['version']}, this nanproof knows {INCIDENT_VERSION}",
                hint="update nanproof",
            )
        known = {f.name for f in dataclasses.fields(cls)} - {"unknown"}
        unknown = {k: v for k, v in data.items() if k not in known}
        return from_json(cls, {k: v for k, v in data.items() if k in known} | {"unknown": unknown})


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One replacement of bytes in a file."""

    path: str
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something found in a file: which rule, where, what to do, and the edits that would do it."""

    code: str
    path: str
    line: int
    column: int
    message: str
    help: str = ""
    edits: tuple[Edit, ...] = ()
    safe: bool = False


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: object) -> Any:
    """Plain JSON values for records, mappings, sequences and numbers; non-finite numbers become words.

    >>> to_json({"loss": math.nan, "names": ("a", "b")})
    {'loss': 'NaN', 'names': ['a', 'b']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if dataclasses.is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


T = TypeVar("T")


def from_json(cls: type[T], data: object) -> T:
    """The record that `to_json` wrote; wrong types are refused with the field named."""
    return typing.cast(T, _read(cls, data, cls.__name__))


def _read(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(data, dict):
            raise FormatError(f"{where} must be an object")
        hints = typing.get_type_hints(kind)
        fields = {f.name: f for f in dataclasses.fields(kind)}
        required = dataclasses.MISSING
        for name, f in fields.items():
            if name not in data and f.default is required and f.default_factory is required:
                raise FormatError(f"{where} has no {name}")
        return kind(**{k: _read(hints[k], v, f"{where}.{k}") for k, v in data.items() if k in fields})
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return _read(next(a for a in args if a is not type(None)), data, where)
    if origin is Literal:
        if data not in args:
            raise FormatError(f"{where} is {data!r}, not one of {args}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise FormatError(f"{where} must be a list")
        return tuple(_read(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if origin is Mapping:
        if not isinstance(data, dict):
            raise FormatError(f"{where} must be an object")
        return {k: _read(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if kind is float:
        if isinstance(data, str) and data in _WORDS:
            return _WORDS[data]
        if isinstance(data, int | float) and not isinstance(data, bool):
            return float(data)
    elif isinstance(data, kind) and not (kind is int and isinstance(data, bool)):
        return data
    raise FormatError(f"{where} must be {kind.__name__}, not {type(data).__name__}")
