"""What can be wrong with a file, as one exception inside this package; it becomes a verdict, never a traceback."""

from __future__ import annotations

from typing import Literal

Health = Literal["healthy", "suspect", "corrupt", "damaged", "unreadable", "refused"]

WORST_FIRST: tuple[Health, ...] = ("refused", "unreadable", "damaged", "corrupt", "suspect", "healthy")


class Flaw(Exception):
    """A file that cannot be read to the end, with the verdict that follows and the sentence that says why."""

    def __init__(self, health: Health, why: str) -> None:
        super().__init__(why)
        self.health: Health = health
        self.why = why


def damaged(why: str) -> Flaw:
    """Truncated, failing its checksum, or saying things about itself that are not so."""
    return Flaw("damaged", why)


def refused(why: str) -> Flaw:
    """Built in a way that no training program builds files and that attacks need."""
    return Flaw("refused", why)


def unreadable(why: str) -> Flaw:
    """Unrecognized format, or no permission to read the file."""
    return Flaw("unreadable", why)


def worst(healths: list[Health]) -> Health:
    """The gravest of some verdicts; nothing at all is unreadable, for unknown is never healthy."""
    return min(healths, key=WORST_FIRST.index, default="unreadable")
