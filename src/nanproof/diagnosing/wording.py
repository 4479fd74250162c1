"""What a description speaks of. People describe the same thing in many words; a topic is what those words share.

>>> [f.value for f in read_text("NaN as soon as a padded row is fully masked", where="symptoms")]
['padding', 'masking', 'all-masked']
>>> [f.name for f in read_text("a smaller learning rate only delays it", where="symptoms") if f.name != "about"]
['lower-lr-only-delays']

The words are data, in ``wording.toml``. Topics say what the text is about, never what the cause is: that is for the
causes to weigh.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from .evidence import Fact

MAX_TEXT = 4_000

_NOT = re.compile(r"(\bno|\bnot|\bnever|\bneither|\bnor|\bwithout|n't)( \w+)? ?$", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]\s")
_EVEN_WHEN_DENIED = {"warm-up", "scaler", "learning-rate", "evaluation"}  # "without warm-up" is about warm-up


@functools.cache
def _patterns(section: str) -> Mapping[str, re.Pattern[str]]:
    table = tomllib.loads(Path(__file__).with_name("wording.toml").read_text(encoding="utf-8"))[section]
    return {name: re.compile("|".join(alternatives), re.IGNORECASE) for name, alternatives in table.items()}


def topics() -> frozenset[str]:
    """All topics that a description can be about."""
    return frozenset(_patterns("about"))


def read_text(text: str, *, where: str) -> Iterator[Fact]:
    """The topics and flags in a description, each topic cited with the words that show it."""
    text = _SENTENCE_END.sub("; ", text[:MAX_TEXT])  # so that a decimal point does not end a sentence
    for name, pattern in _patterns("about").items():
        found = _affirmed(pattern, text, even_denied=name in _EVEN_WHEN_DENIED)
        if found:
            yield Fact(name="about", value=name, where=where, words=f"“{_clip(found)}”", weak=True)
    for name, pattern in _patterns("flags").items():
        if _affirmed(pattern, text):
            yield Fact(name=name, where=where, weak=True)


def _affirmed(pattern: re.Pattern[str], text: str, *, even_denied: bool = False) -> str:
    """The first match that no "no" or "not" just before it takes back."""
    for match in pattern.finditer(text):
        denied = not even_denied and _NOT.search(text[: match.start()][-24:])
        if not denied and match.group().strip():
            return match.group().strip()
    return ""


def _clip(words: str) -> str:
    return words if len(words) <= 40 else words[:39] + "…"
