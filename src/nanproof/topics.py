"""What `nanproof explain` can explain: a rule, a config check, a cause. One page each, written from the object itself.

>>> topic = Topic(name="NP301", title="clip without unscale", sections=(("What it does", "Finds clipping."),))
>>> print(topic.markdown())
# NP301: clip without unscale
<BLANKLINE>
## What it does
<BLANKLINE>
Finds clipping.
<BLANKLINE>
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A page of documentation that lives beside the code it documents."""

    name: str
    title: str
    sections: tuple[tuple[str, str], ...]
    """Pairs of heading and Markdown, in reading order."""

    def markdown(self) -> str:
        parts = [f"# {self.name}: {self.title}", ""]
        for heading, text in self.sections:
            parts += [f"## {heading}", "", text.strip(), ""]
        return "\n".join(parts)
