"""Where a bad value was born: the record, and how it reads on a screen."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..records import TensorFacts, to_json

Phase = Literal["forward", "backward", "leaf", "outside"]
Mechanism = Literal[
    "range-overflow", "underflow", "pole", "invalid", "where-gradient", "masked-row", "empty-reduction", "bad-leaf",
    "outside-dispatcher", "unknown",
]  # fmt: skip

ADVICE: Mapping[str, str] = {
    "range-overflow": "too large for its dtype: use bf16 or fp32 here, scale the inputs, or work in log space",
    "underflow": "a value was rounded to zero before: use the fused form (log_softmax, bce_with_logits)",
    "pole": "no finite value there: keep the argument away from it, for example with nanproof.ops.safe_div or safe_log",
    "invalid": "not defined there: check the inputs, or compute it only where it is defined",
    "where-gradient": "torch.where hides the value, not its gradient: use nanproof.ops.select, or make the input safe",
    "masked-row": "every entry of a row is masked: use nanproof.ops.masked_softmax, or leave such rows out",
    "empty-reduction": "nothing was left to average: use nanproof.ops.masked_mean or masked_cross_entropy",
    "bad-leaf": "bad on arrival: repair the parameter, buffer or batch; nanproof scan finds a healthy checkpoint",
    "outside-dispatcher": "it comes from code that torch does not see (numpy, C++): check what that code returns",
    "unknown": "look at the inputs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The origin of a bad step. ``str(location)`` reads like a test failure."""

    reproduced: bool
    phase: Phase | None = None
    op: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    code: tuple[str, ...] = ()
    """The source around the line as it was, the line itself marked."""
    module: str = ""
    mechanism: Mechanism = "unknown"
    why: str = ""
    """The mechanism in words and numbers."""
    inputs: tuple[TensorFacts, ...] = ()
    outputs: tuple[TensorFacts, ...] = ()
    leaf: str = ""
    """The parameter, buffer or batch item that was bad on arrival, with the first bad index."""
    chain: tuple[str, ...] = ()
    """From the origin to the loss or the gradient."""
    verified: bool | None = None
    """True when neutralising just this operation heals the step; None when that could not be tried."""
    also: tuple[Location, ...] = ()
    """Further origins, when there are several."""
    rank: int | None = None
    component: str = ""
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain values for an incident's record."""
        data: dict[str, Any] = to_json(self)
        return data

    def __str__(self) -> str:
        if not self.reproduced:
            return "\n".join(["the step did not fail when it was played again", *(f"  {n}" for n in self.notes)])
        where = f"{self.file}:{self.line} in {self.function}" if self.line else "outside the code that was traced"
        lines = [f"{self.mechanism} in {self.op or 'a value'} ({self.phase})", f"  {where}"]
        if self.module:
            lines.append(f"  module {self.module}" + (f", rank {self.rank}" if self.rank is not None else ""))
        lines += [f"  loss term {self.component}"] if self.component else []
        lines += self.code
        lines += [f"  E  {self.why}"] if self.why else []
        lines += [f"  in   {f}" for f in self.inputs] + [f"  out  {f}" for f in self.outputs]
        if self.chain:
            lines.append(f"  path {' → '.join(self.chain[:8])}{' → …' if len(self.chain) > 8 else ''}")
        lines += [f"  note {n}" for n in self.notes]
        told = {True: "verified: without this operation the step is finite", False: "not the only origin", None: ""}
        lines += [f"  {told[self.verified]}"] if told[self.verified] else []
        lines += [f"  also {o.op} at {o.file}:{o.line} ({o.mechanism})" for o in self.also]
        return "\n".join([*lines, f"  do   {ADVICE[self.mechanism]}"])


def code_frame(file: str, line: int, around: int = 2) -> list[str]:
    """The source around a line, the line itself marked.

    >>> code_frame("no such file", 3)
    []
    """
    shown = []
    for n in range(max(1, line - around), line + around + 1):
        text = linecache.getline(file, n).rstrip()
        if text:
            shown.append(f"  {'>' if n == line else ' '} {n:>5} | {text}")
    return shown if any(s.startswith("  >") for s in shown) else []
