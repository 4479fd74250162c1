"""What is known of a run besides its config: the grounds on which a setting may be changed.

>>> facts = Facts.of({"cause": "lr-too-high", "gpu": "A100"}, source="--fact")
>>> facts.says("cause"), facts.tell("gpu")
('lr-too-high', '--fact: gpu is A100')
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import UsageError
from .value import Plain, as_number, show

KNOWN = {
    "cause": "a cause that nanproof diagnose named, such as lr-too-high or fp16-overflow; several with commas",
    "gpu": "the processor, such as A100 or V100",
    "parameters": "how many parameters the model has",
    "trainable": "how many of them are trained",
    "lr_in_force": "the learning rate that a log or an optimizer shows",
    "checkpoint_lr": "the learning rate that the checkpoint restores",
    "checkpoint": "the name of that checkpoint",
    "nan_step": "the first step with a non-finite loss or gradient",
    "last_healthy": "the newest checkpoint that scans healthy",
    "last_healthy_step": "its step",
    "grad_norm": "the usual gradient norm before the failure",
    "grad_norm_peak": "the largest finite gradient norm",
    "nan_hidden": "true when the log shows loss 0.0 beside a NaN gradient norm",
    "resumed_at": "the step at which the run was resumed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact and where it comes from: a log line, a checkpoint, the user."""

    name: str
    value: Plain
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts by name; the first word on each counts."""

    found: Mapping[str, Fact] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Mapping[str, Plain] | Iterable[Fact], source: str = "given") -> Facts:
        if isinstance(facts, Mapping):
            facts = [Fact(name=k, value=v, source=source) for k, v in facts.items()]
        found: dict[str, Fact] = {}
        for fact in facts:
            if fact.name not in KNOWN:
                raise UsageError(
                    f"{fact.name} is not a fact that hardening knows", hint=f"choose from {', '.join(KNOWN)}"
                )
            found.setdefault(fact.name, fact)
        return cls(found=found)

    def __iter__(self) -> Iterator[Fact]:
        return iter(self.found.values())

    def says(self, name: str) -> str:
        """The fact in words; '' when it is not known."""
        fact = self.found.get(name)
        return "" if fact is None or fact.value is None else str(fact.value)

    def number(self, name: str) -> float | None:
        fact = self.found.get(name)
        return as_number(fact.value) if fact is not None else None

    def holds(self, name: str) -> bool:
        return self.says(name).lower() in ("true", "yes", "1")

    def causes(self) -> set[str]:
        return {c.strip() for c in self.says("cause").split(",") if c.strip()}

    def tell(self, name: str) -> str:
        """The fact as a piece of evidence."""
        fact = self.found[name]
        return f"{fact.source}: {name} is {show(fact.value)}"

    def plain(self) -> dict[str, object]:
        return {f.name: f.value for f in self}
