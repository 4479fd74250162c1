"""Finite but useless: a run whose numbers are all finite and that has learned nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..logs import Series
from ..logs.timeline import timeline
from .diagnosis import Looked
from .evidence import Fact
from .sources.part import Part, name_in

_SUCCESS = re.compile(
    r"(^|[/_ ])(acc(uracy)?|answer_?rate|exact_?match|em|f1|map(50)?|m?iou|dice|bleu|pass@?1|success|recall|score)"
    r"([/_ ]|$)",
    re.IGNORECASE,
)
FEW_STEPS = 50


def find_useless(series: Sequence[Series], root: Path) -> Part:
    """What makes a finite run useless, each with its numbers."""
    found = [(one, name, words) for one in series for name, words in look(one)]
    facts = tuple(Fact(name=name, where=name_in(root, one.source), words=words) for one, name, words in found)
    looked = tuple(Looked(mark="!", what="usefulness", found=words) for _, _, words in found)
    return Part(facts=facts, looked=looked)


def look(series: Series) -> Iterator[tuple[str, str]]:
    """Facts about one log: metrics that stay 0, a loss that is flat or at chance, a run of too few steps."""
    story = timeline(series)
    for column in series.columns.values():
        values = column.values[~column.bad]
        if _SUCCESS.search(column.name) and len(values) and not np.any(values):
            yield (
                "useless",
                f"{column.name} is 0 at all {len(values):,} points: nothing is right, whatever the loss says",
            )
            yield "no-learning", f"{column.name} is 0 throughout"
    for moment in story.of("flat", "chance", "masked-loss")[:2]:
        yield "useless", moment.text
    if story.outcome in ("healthy", "useless") and story.last_step is not None and story.unit == "step":
        length = story.last_step - (story.first_step or 0)
        if 0 < length < FEW_STEPS and (series.max_steps is None or series.max_steps < FEW_STEPS):
            yield "useless", f"only {length + 1} steps: too few to have learned anything"
