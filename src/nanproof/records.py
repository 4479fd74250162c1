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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .cards import card
from .errors import FormatError
from .jsonform import from_json as from_json
from .jsonform import to_json as to_json
from .location import Location as Location
from .location import TensorFacts as TensorFacts

Kind = Literal[
    "ok", "pending", "nonfinite", "overflow", "spike", "exception", "forecast", "dead", "unmoved", "guard-failed"
]
Level = Literal[
    "input", "prediction", "loss", "gradient", "parameter", "buffer", "hyperparameter", "activation", "guard"
]
Origin = Literal["transient", "range", "data", "state", "scale"]
Step = Literal["commit", "skip", "rerun", "heal", "rollback", "restore", "stop"]

INCIDENT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one training step looked like, in host numbers; NaN is what was not read."""

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
    risk: float | None = None
    """How likely the run is to break soon, from 0 to 1."""

    @classmethod
    def unread(cls, step: int) -> Reading:
        """Of a step whose numbers are not known."""
        return cls(step=step, loss=math.nan, grad_norm=math.nan, lr=math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one step. ``verdict.ok`` is all that most loops need.

    ``ok`` is true only for a step that was judged and found good; ``pending`` means that it is not judged yet
    (deferred timing, or a micro-batch whose window is not full).
    """

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

    @property
    def pending(self) -> bool:
        return self.kind == "pending"

    def __str__(self) -> str:
        what = f" {self.level}" if self.level else ""
        names = f" ({', '.join(self.names[:3])}{' …' if len(self.names) > 3 else ''})" if self.names else ""
        value = f" {self.value:.4g}" if self.value is not None else ""
        limit = f" above {self.limit:.4g}" if self.limit is not None else ""
        rank = f" on rank {self.rank}" if self.rank is not None else ""
        origin = f", origin: {self.origin}" if self.origin else ""
        return f"step {self.step:,}: {self.kind}{what}{value}{limit}{names}{rank}{origin}"

    def _repr_html_(self) -> str:
        return card(str(self), good=None if self.pending else self.ok)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the policy decided to do about a verdict, and why."""

    kind: Step
    reason: str = ""


RepairKind = Literal["float32", "eager", "math-attention", "eps"]
_REPAIRS: dict[str, str] = {
    "float32": "computes in float32",
    "eager": "runs eagerly",
    "math-attention": "uses the math attention kernel",
    "eps": "steps with eps {value:g}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A repair that is in force in a run.

    >>> repair = Repair(path="layers.0.mlp", kind="float32", step=12)
    >>> f"{repair.name} {repair.does}"
    'layers.0.mlp computes in float32'
    """

    path: str
    """The module's path in the model; empty for the model itself; FILE:LINE for a line; the class of an optimizer."""
    kind: RepairKind
    step: int
    """The step since which it is in force."""
    value: float = 0.0
    """The eps of an optimizer."""
    heavy: bool = False
    """Whether weights and casts inside are followed, whatever the weights' dtype."""
    why: str = ""
    was: str = ""
    """The dtype in which the step failed."""
    proof: str = ""
    share: float = 0.0
    """The share of the model's parameters in it."""
    largest: float = 0.0
    """The largest value that left it when it was opened."""

    @property
    def name(self) -> str:
        return self.path or "the whole model"

    @property
    def does(self) -> str:
        return _REPAIRS[self.kind].format(value=self.value)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_json(self)
        return plain

    @classmethod
    def from_json(cls, data: object) -> Repair:
        return from_json(cls, data)


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
    location: Location | None = None
    """The operation that broke the step, as far as it was found when it happened."""
    version: int = INCIDENT_VERSION
    unknown: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A strict-JSON dictionary that follows the published schema."""
        plain = to_json(self)
        assert isinstance(plain, dict)
        unknown: dict[str, Any] = plain.pop("unknown")
        return unknown | plain

    def _repr_html_(self) -> str:
        place = self.location
        facts = {"answer": f"{self.action.kind}: {self.action.reason}", "time": self.time, "rank": f"{self.rank}"}
        return card(
            str(self.verdict), facts | {f"note {n}": note for n, note in enumerate(self.notes, 1)}, good=False
        ) + (place._repr_html_() if place is not None else "")

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
    info: bool = False
    """Possible, but nothing in the code says that it happens: shown on demand only."""
