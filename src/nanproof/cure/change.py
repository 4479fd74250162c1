"""A change of a program: small, reversible, with a reason.

>>> half = Change(name="lr/2", kind="learning rate", why="the step is too long", size=1.0,
...               edits=(Edit(route="flag", name="--lr", text="0.05"),))
>>> clip = Change(name="clip 1.0", kind="clipping", why="one large gradient", size=0.7,
...               edits=(Edit(route="option", name="--max-norm", text="1.0"),))
>>> (half + clip).name, sorted((half + clip).keys)
('lr/2 + clip 1.0', ['flag --lr', 'option --max-norm'])
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Route = Literal["word", "flag", "variable", "file", "option"]
"""``key=value``, ``--flag value``, an environment variable, text in a file, an option of ``nanproof run``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One value on its way into the program."""

    route: Route
    name: str
    """The dotted key, the flag, the variable, the file's absolute path, or the option."""
    text: str | None = None
    """The new value as typed, or the new text; None for a flag that stands alone."""
    start: int = 0
    """In a file: the bytes that are replaced …"""
    end: int = 0
    remove: bool = False
    """A flag that is taken away."""
    setting: str = ""
    """What it means to the user: ``optimizer.lr``; two edits of one setting exclude each other."""
    before: str = ""

    @property
    def key(self) -> str:
        place = f" {self.start}" if self.route == "file" and not self.setting else ""
        return self.setting or f"{self.route} {self.name}{place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A candidate: what is different from the original, and why that may help."""

    name: str
    kind: str
    why: str
    size: float
    """How much of what the user meant it changes; the smaller of two cures wins."""
    edits: tuple[Edit, ...] = ()
    part: str = field(default="")
    """Among precisions: what is stored in it (weights) or computed in it (compute)."""

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(e.key for e in self.edits)

    @property
    def guarded(self) -> bool:
        """Whether the guard acts in it, instead of only recording."""
        return any(e.route == "option" and e.name in ("--policy", "--heal") for e in self.edits)

    def fits(self, other: Change) -> bool:
        """Whether both can be made at once."""
        return not self.keys & other.keys and not any(_overlap(a, b) for a in self.edits for b in other.edits)

    def __add__(self, other: Change) -> Change:
        return Change(
            name=f"{self.name} + {other.name}",
            kind=self.kind if self.kind == other.kind else "pair",
            why=f"{self.why}; {other.why}",
            size=self.size + other.size,
            edits=(*self.edits, *other.edits),
        )


ORIGINAL = Change(name="original", kind="original", why="as it is", size=0.0)


def _overlap(a: Edit, b: Edit) -> bool:
    return a.route == b.route == "file" and a.name == b.name and a.start < b.end and b.start < a.end


def edited(data: bytes, edits: list[Edit]) -> bytes:
    """The contents of a file with all of its edits made.

    >>> edited(b"lr = 0.1", [Edit(route="file", name="a.py", text="0.05", start=5, end=8)])
    b'lr = 0.05'
    """
    for edit in sorted(set(edits), key=lambda e: (e.start, e.end), reverse=True):
        data = data[: edit.start] + (edit.text or "").encode() + data[edit.end :]
    return data
