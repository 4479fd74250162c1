"""What is known about a run: facts, each with the place it was read from.

>>> evidence = Evidence.of(Fact(name="precision", value="fp16", where="config.yaml:12"), Fact(name="loss-nan"))
>>> [str(f) for f in evidence.named("precision")]
['precision fp16 (config.yaml:12)']
>>> bool(evidence.named("grad-nan"))
False

A fact is a flag of the vocabulary (``loss-nan``, value True) or a value under a name (``lr``, 3e-4). Evidence is
never changed; `Evidence.plus` gives a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .vocabulary import phrase

Value = str | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing known. ``where`` is "log.txt:31", "step 17,226", "--fact", "checkpoint last.pt" …"""

    name: str
    value: Value = True
    where: str = ""
    words: str = ""
    """How it reads, when name and value alone do not say it."""
    weak: bool = False
    """Read out of prose: it may be wrong, and alone it proves nothing."""

    @property
    def said(self) -> str:
        if self.words:
            return self.words
        if isinstance(self.value, bool):
            return phrase(self.name) if self.value else f"not so: {phrase(self.name)}"
        shown = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return phrase(shown) if self.name in ("onset", "about") else f"{self.name.replace('_', ' ')} {shown}"

    def __str__(self) -> str:
        return f"{self.said} ({self.where})" if self.where and self.where not in self.words else self.said


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All facts, by name, in the order in which they were found."""

    by_name: Mapping[str, tuple[Fact, ...]] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, *facts: Fact) -> Evidence:
        found: dict[str, tuple[Fact, ...]] = {}
        for fact in facts:
            known = found.get(fact.name, ())
            if not any((f.value, f.where, f.words) == (fact.value, fact.where, fact.words) for f in known):
                found[fact.name] = (*known, fact)
        return cls(by_name=MappingProxyType(found))

    def plus(self, *facts: Fact) -> Evidence:
        return Evidence.of(*self, *facts)

    def named(self, name: str) -> tuple[Fact, ...]:
        return self.by_name.get(name, ())

    def denied(self, name: str) -> bool:
        """Whether somebody said that it is not so."""
        return any(f.value is False for f in self.named(name))

    def number(self, name: str) -> float | None:
        """The first number under a name."""
        numbers = [float(f.value) for f in self.named(name) if isinstance(f.value, float | int)]
        return numbers[0] if numbers else None

    def __iter__(self) -> Iterator[Fact]:
        for facts in self.by_name.values():
            yield from facts

    def __len__(self) -> int:
        return sum(len(f) for f in self.by_name.values())
