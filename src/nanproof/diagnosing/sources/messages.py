"""What a log says in words, as facts: the messages that `nanproof.logs.messages` knows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...logs import Event, Series
from ...logs.messages import AFTERMATH
from ...logs.moments.words import find_outside, is_outside
from ..evidence import Fact
from ..wording import read_text

_FLAGS: dict[str, tuple[str, ...]] = {
    "unscale-fp16": ("unscale-error",),
    "newly-initialised": ("newly-initialised",),
    "labels-masked": ("labels-all-masked",),
    "kernel-not-built": ("kernel-not-built",),
    "sdpa-strides": ("cudnn-sdpa-warning",),
    "checkpoint-unreadable": ("checkpoint-unreadable",),
    "device-assert": ("device-assert",),
    "label-assert": ("labels-out-of-range",),
    "invalid-value": ("preprocessing-warning",),
    "nccl": ("collective-timeout",),
    "probabilities": ("distribution-failed",),
    "distribution": ("distribution-failed",),
    "negative-std": ("distribution-failed", "std-shrinks"),
    "anomaly": ("grad-nan",),
    "empty-tensor": ("empty-tensor",),
    "empty-split": ("empty-split",),
    "norm-in-mean": ("grad-nan-skipped",),
    "nan-in-line": ("loss-nan",),
    "nan-detected": ("loss-nan",),
    "xid": ("xid-error",),
    "not-repeatable": ("not-repeatable",),
    "memory-error": ("xid-error",),
    "scale-minimum": ("loss-scale-collapse",),
    "nan-in-file": ("nan-in-preprocessing",),
    "nan-in-data": ("nan-in-preprocessing",),
    "grad-nonfinite": ("grad-nan",),
    "loss-nonfinite": ("loss-nan",),
}
_TOPICS = {
    "probabilities": "distribution-error",
    "distribution": "distribution-error",
    "negative-std": "distribution-error",
    "scale-minimum": "minimum-scale",
}
_READ = ("backward-op", "attention-op", "distribution-error", "ctc", "label-values", "no-targets", "ignored-labels")
"""Topics that an exception's own words can be about; the others are too vague for a line of a log."""
MOST = 200
_PAIR = re.compile(r"([A-Za-z_][\w/.]{1,40})\s{0,3}[:= ]\s{0,3}(nan|\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b", re.IGNORECASE)


def read_messages(series: Series, name: str) -> Iterator[Fact]:
    """The facts in the events of one log; each message counts once."""
    seen: set[str] = set()
    end = find_outside(series)
    if end is not None:
        yield Fact(name="ended-outside", value=end.name, where=_place(name, end), words=end.text.strip()[:120])
    for event in series.events[:5000]:
        if len(seen) > MOST:
            return
        if end is not None and event.row >= end.row and AFTERMATH.search(event.text):
            continue
        for fact in _facts(event, _place(name, event)):
            key = f"{fact.name}={fact.value}"
            if key not in seen:
                seen.add(key)
                yield fact


def _facts(event: Event, where: str) -> Iterator[Fact]:
    words = f"“{event.text.strip()[:120]}”"
    for flag in _FLAGS.get(event.name, ()):
        yield Fact(name=flag, where=where, words=words)
    if event.name == "nan-in-line":
        pairs = dict(_PAIR.findall(event.text))
        bad = [name for name, value in pairs.items() if value.lower() == "nan"]
        if bad and any(v.lower() != "nan" and float(v) for v in pairs.values()):
            yield Fact(name="one-component-nan", where=where, words=f"{', '.join(bad[:3])} NaN, others finite: {words}")
    if event.name in _TOPICS:
        yield Fact(name="about", value=_TOPICS[event.name], where=where, words=words)
    if event.name == "newly-initialised" and _telling(event.details.get("names", "")):
        yield Fact(name="loss-above-uniform", where=where, words=f"weights missing that belong to the body: {words}")
    if is_outside(event):
        return
    if event.kind == "exception" or event.name in ("anomaly", *_TOPICS):
        yield Fact(name="hard-error", where=where, words=words)
        for fact in read_text(event.text, where=where):
            if fact.value == "no-targets" and "ZeroDivisionError" in event.text:
                continue  # many things are divided by
            if fact.value in _READ:  # the words of an exception are those of the program
                yield Fact(name="about", value=fact.value, where=where, words=words)
    if event.name == "newly-initialised":
        yield Fact(name="warning-in-log", where=where, words=words)


def _telling(names: str) -> bool:
    """A new head is normal; a new norm or embedding means that the checkpoint does not fit."""
    return any(word in names for word in ("embed", "norm", "ln_", "layer.0", "layers.0"))


def _place(name: str, event: Event) -> str:
    if event.line is not None:
        return f"{name}:{event.line}"
    return f"{name}, step {event.step:,}" if event.step is not None else name
