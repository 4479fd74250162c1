"""Where a bad value was born: the record, and how it reads on a screen."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .cards import card
from .jsonform import from_json, to_json

Phase = Literal["forward", "backward", "leaf", "outside"]
Mechanism = Literal[
    "range-overflow",
    "underflow",
    "pole",
    "invalid",
    "where-gradient",
    "masked-row",
    "empty-reduction",
    "bad-leaf",
    "uninitialized",
    "communication",
    "compiled-only",
    "loss-expression",
    "outside-dispatcher",
    "unknown",
]

ADVICE: Mapping[str, str] = {
    "range-overflow": "too large for its dtype: use bf16 or fp32 here, scale the inputs, or work in log space",
    "underflow": "lost to rounding before: use the fused form (log_softmax, bce_with_logits, torch.var), or float64",
    "pole": "no finite value there: keep the argument away from it, for example with {op}",
    "invalid": "not defined there: check the inputs, or compute it only where it is defined",
    "where-gradient": "torch.where hides the value, not its gradient: use nanproof.ops.select, or make the input safe",
    "masked-row": "every entry of a row is masked: use nanproof.ops.masked_softmax, or leave such rows out",
    "empty-reduction": "nothing was left to average: use nanproof.ops.masked_mean or masked_cross_entropy",
    "bad-leaf": "bad before the step: repair the parameter, buffer or batch; nanproof scan finds a healthy checkpoint",
    "uninitialized": "initialize it: torch.zeros, torch.full, or nn.init for a parameter",
    "communication": "look at the other ranks: the value was bad in what they sent, or its sum left the dtype's range",
    "compiled-only": "run this module eagerly (torch.compiler.disable) and report it to PyTorch",
    "loss-expression": "look at what is computed between the model's output and the loss, and what else goes into it",
    "outside-dispatcher": "it comes from code that torch does not see (numpy, C++): check what that code returns",
    "unknown": "look at the inputs",
}
_WIDE = ("bfloat16", "float32", "float64")
_EXPONENTIALS = ("exp", "expm1", "exp2", "sinh", "cosh", "pow", "lgamma")
_SAFE = {
    "sqrt": "safe_sqrt",
    "rsqrt": "safe_sqrt",
    "norm": "safe_norm",
    "cdist": "safe_norm",
    "hypot": "safe_norm",
    "normalize": "normalize",
    "div": "safe_div",
    "1 / x": "safe_div",
    "log": "safe_log",
    "log2": "safe_log",
    "log10": "safe_log",
    "layer_norm": "rms_norm",
    "softmax": "masked_softmax",
    "log_softmax": "masked_softmax",
}
_FRIENDLY = {
    "_cdist_forward": "cdist",
    "_ctc_loss": "ctc_loss",
    "_euclidean_dist": "cdist",
    "_linalg_det": "det",
    "_linalg_eigh": "linalg.eigh",
    "_linalg_svd": "linalg.svd",
    "_log_softmax": "log_softmax",
    "_softmax": "softmax",
    "_to_copy": "to",
    "addmm": "linear",
    "allreduce_": "all_reduce",
    "bmm": "matmul",
    "linalg_cholesky_ex": "linalg.cholesky",
    "linalg_inv_ex": "linalg.inv",
    "linalg_vector_norm": "norm",
    "mm": "matmul",
    "native_batch_norm": "batch_norm",
    "native_group_norm": "group_norm",
    "native_layer_norm": "layer_norm",
    "nll_loss_forward": "nll_loss",
    "reciprocal": "1 / x",
}


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
class Location:
    """The origin of a bad step. ``str(location)`` reads like a test failure."""

    reproduced: bool
    phase: Phase | None = None
    op: str = ""
    """The operation that the code calls; for a bad gradient the call whose derivative it is."""
    file: str = ""
    line: int = 0
    function: str = ""
    """The innermost line that the user wrote, outside installed packages."""
    stack: tuple[str, ...] = ()
    """From that line down to the library line that runs the operation, when they differ."""
    code: tuple[str, ...] = ()
    """The source around the line as it was, the line itself marked."""
    commit: str = ""
    """The commit that last changed the line, with its author and date, when git knows it."""
    module: str = ""
    mechanism: Mechanism = "unknown"
    why: str = ""
    """The mechanism in words and numbers."""
    inputs: tuple[TensorFacts, ...] = ()
    outputs: tuple[TensorFacts, ...] = ()
    leaf: str = ""
    """The parameter, buffer or batch item that was already bad, with the first bad index."""
    chain: tuple[str, ...] = ()
    """From the origin to the loss or the gradient."""
    verified: bool | None = None
    """True for a proved origin: its inputs are good and its output is not, that stays so when earlier operations are
    computed in float64, together or one at a time, and the step is finite with just this repaired."""
    doubt: str = ""
    """Why it is not verified."""
    written_by: str = ""
    """The optimizer that wrote the bad parameter, when that is known."""
    replayed: bool = False
    """Whether that optimizer's update, replayed from a healthy snapshot, wrote it again."""
    loss: float | None = None
    """What the replayed step gave: a replay of the same incident elsewhere must give it again."""
    also: tuple[Location, ...] = ()
    """Further origins, when there are several."""
    rank: int | None = None
    component: str = ""
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain values for an incident's record."""
        data: dict[str, Any] = to_json(self)
        return data

    @classmethod
    def from_json(cls, data: object) -> Location:
        """Read back what `to_json` wrote."""
        return from_json(cls, data)

    @property
    def place(self) -> str:
        """The file and line, as an editor or a command typed here takes them."""
        return f"{shown_path(self.file)}:{self.line}"

    @property
    def leaf_kind(self) -> str:
        """What kind of leaf was bad: parameter, buffer, attribute, batch or input.

        >>> Location(reproduced=True, leaf="batch[0, 1]").leaf_kind
        'batch'
        """
        return re.split(r"\W", self.leaf, maxsplit=1)[0]

    @property
    def outgrew(self) -> Literal["", "exp", "growth"]:
        """What an overflow of the widest range comes from: ``exp`` of a plain number, or values that have grown.

        >>> half = TensorFacts(name="output", shape=(1,), dtype="float16", posinf=1)
        >>> Location(reproduced=True, mechanism="range-overflow", op="exp", outputs=(half,)).outgrew
        ''
        >>> wide = TensorFacts(name="output", shape=(1,), dtype="float32", posinf=1)
        >>> Location(reproduced=True, mechanism="range-overflow", op="exp", outputs=(wide,)).outgrew
        'exp'
        """
        bad = [facts.dtype for facts in self.outputs if facts.bad]
        if self.mechanism != "range-overflow" or not bad or any(dtype not in _WIDE for dtype in bad):
            return ""
        ends = (end for facts in self.inputs for end in (facts.finite_min, facts.finite_max) if end is not None)
        plain = max(map(abs, ends), default=0.0) < 1e6
        return "exp" if plain and call_name(self.op) in _EXPONENTIALS else "growth"

    @property
    def advice(self) -> str:
        """What to change, with the safe operation for the one that failed."""
        if self.outgrew == "exp":
            return "no float is wide enough: bound what goes into it (clamp, log space, a smaller scale)"
        if self.outgrew == "growth":
            return "no float is wide enough: its inputs have grown; lower the learning rate, clip, or normalize them"
        if self.mechanism == "bad-leaf" and self.written_by:
            return f"{self.written_by} wrote it: change its eps, lr, weight decay or dtype; take a healthy checkpoint"
        safe = _SAFE.get(call_name(self.op))
        if self.mechanism == "invalid" and safe:
            return f"{ADVICE['invalid']}; nanproof.ops.{safe} is finite there"
        return ADVICE[self.mechanism].format(op=f"nanproof.ops.{safe or 'select'}")

    @property
    def proof(self) -> str:
        """What `verified` says, in words."""
        if self.verified is None:
            return f"not verified: {self.doubt}" if self.doubt else ""
        if not self.verified:
            return f"not verified: it is on the path of the bad value, but {self.doubt}"
        if self.replayed:
            return "verified: the optimizer's update, replayed from finite values, makes it non-finite again"
        if self.mechanism == "communication":
            return "verified: each rank replayed its own part and found it finite"
        if self.mechanism == "compiled-only":
            return "verified: the step is finite once just this module runs eagerly"
        if self.mechanism == "uninitialized":
            return "verified: with NaN in this memory the step fails, so it reads what nobody wrote"
        if self.phase in ("leaf", "outside"):
            return "verified: the step is finite once just this is repaired"
        return (
            "verified: its inputs are good and its output is not, and no rounding before it is to blame; the step is "
            "finite once just its bad values are replaced"
        )

    def __str__(self) -> str:
        if not self.reproduced:
            return "\n".join(["the step did not fail when it was replayed", *(f"  {n}" for n in self.notes)])
        where = f"{self.place} in {self.function}" if self.line else "outside the code that was traced"
        name = call_name(self.op) or self.leaf or "a value"
        lines = [f"{self.mechanism} in {name} ({self.phase})", f"  {where}"]
        lines += [f"    → {frame}" for frame in self.stack]
        if self.module:
            lines.append(f"  module {self.module}" + (f", rank {self.rank}" if self.rank is not None else ""))
        lines += [f"  loss term {self.component}"] if self.component else []
        lines += self.code
        lines += [f"  last changed by {self.commit}"] if self.commit else []
        lines += [f"  E  {self.why}"] if self.why else []
        lines += [f"  in   {f}" for f in self.inputs] + [f"  out  {f}" for f in self.outputs]
        if self.chain:
            lines.append(f"  path {' → '.join(self.chain[:8])}{' → …' if len(self.chain) > 8 else ''}")
        lines += [f"  note {n}" for n in self.notes]
        lines += [f"  {self.proof}"] if self.proof else []
        lines += [f"  also {call_name(o.op) or o.leaf} at {o.place} ({o.mechanism})" for o in self.also]
        return "\n".join([*lines, f"  do   {self.advice}"])

    def _repr_html_(self) -> str:
        if not self.reproduced:
            return card("the step did not fail when it was replayed", {"note": "; ".join(self.notes)})
        name = call_name(self.op) or self.leaf or "a value"
        return card(f"{self.mechanism} in {name} ({self.phase})", _facts(self), good=False, code=self.code)


def _facts(place: Location) -> dict[str, str]:
    where = f"{place.place} in {place.function}" if place.line else "outside the code that was traced"
    return {
        "where": where,
        "module": place.module,
        "why": place.why,
        "path": " → ".join(place.chain[:8]),
        "proof": place.proof,
        "last changed by": place.commit,
        "do": place.advice,
    }


_started_in = ""
with suppress(OSError):  # a folder that is gone
    _started_in = str(Path.cwd())


def shown_path(path: str) -> str:
    """A path as it can be typed where this program was started, whatever folder it has changed to since.

    >>> shown_path(f"{_started_in}/src/train.py"), shown_path("/elsewhere/train.py")
    ('src/train.py', '/elsewhere/train.py')
    """
    inside = _started_in and path.startswith(_started_in.rstrip("/") + "/")
    return path[len(_started_in.rstrip("/")) + 1 :] if inside else path


def code_frame(file: str, line: int, around: int = 2) -> list[str]:
    """The source around a line, the line itself marked.

    >>> code_frame("no such file", 3)
    []
    """
    lines = linecache.getlines(file)
    if not 0 < line <= len(lines):
        return []
    near = range(max(1, line - around), min(len(lines), line + around) + 1)
    return [f"  {'>' if n == line else ' '} {n:>5} | {lines[n - 1].rstrip()}".rstrip() for n in near]


def call_name(op: str) -> str:
    """The name under which a user calls an operation.

    >>> call_name("linalg_vector_norm"), call_name("SqrtBackward0"), call_name("add_")
    ('norm', 'sqrt', 'add')
    """
    if match := re.match(r"(\w+?)Backward\d*$", op):
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", match.group(1)).lower()
        op = words if not words.startswith("linalg_vector") else "linalg_vector_norm"
    if op.startswith("_scaled_dot_product"):
        return "scaled_dot_product_attention"
    return _FRIENDLY.get(op, op.strip("_") or op)
