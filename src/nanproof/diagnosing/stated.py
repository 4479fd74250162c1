"""``--fact k=v``: what only the user knows.

>>> [str(f) for f in read_facts({"loss": "0.0", "grad_norm": "nan", "onset": "step-1", "precision": "bf16"})]
['it is there at the first step (--fact)', 'precision=bf16 (--fact)', 'grad_norm nan (--fact)',
 'loss 0.0 with grad_norm nan (--fact)']
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping

from ..errors import UsageError
from .bugs import PACKAGES, read_versions
from .curves import read_rows
from .described import as_number
from .evidence import Fact
from .machines import read_hardware
from .precisions import find_format, read_precision
from .questions import BY_NAME
from .vocabulary import FLAGS, ONSETS
from .wording import read_text, topics

WHERE = "--fact"
NUMBERS = ("lr", "eps", "beta2", "clip", "warmup", "batch", "seq", "init_std", "zloss", "wd", "gpus", "hidden", "accum")
MEASURED = ("loss", "grad_norm")
TEXTS = ("framework", "model", "symptoms", "hardware", "gpu", "optimizer")
_YES, _NO = {"yes", "true", "1", "on", ""}, {"no", "false", "0", "off"}
_EXTRA = {"resumed", "compiled", "overlap-comm", "fused-optimizer", "several-nodes", "bf16-fine", "nightly-torch"}


def known_names() -> list[str]:
    """Every name that ``--fact`` understands."""
    return sorted({*BY_NAME, *FLAGS, *_EXTRA, *NUMBERS, *MEASURED, *TEXTS, *PACKAGES, "onset", "about"})


def read_facts(stated: Mapping[str, object]) -> tuple[Fact, ...]:
    """The facts behind names and values; a name or a value that means nothing is refused with the nearest that does."""
    facts: list[Fact] = []
    row: dict[str, float] = {}
    for name, value in stated.items():
        text = str(value).strip()
        if name in MEASURED:
            row[name] = _number(name, text)
        else:
            facts += _one(name, text)
    facts += read_rows([row], where=WHERE)
    if not math.isfinite(row.get("loss", 0.0)):
        facts.append(Fact(name="loss-nan", where=WHERE))
    return tuple(facts)


def _one(name: str, text: str) -> Iterator[Fact]:
    if name == "onset":
        chosen = text.replace("step-", "step")
        if chosen not in ONSETS:
            raise UsageError(f"onset cannot be {text!r}", hint=f"one of {', '.join(ONSETS)}")
        yield Fact(name="onset", value=chosen, where=WHERE)
    elif name == "about":
        if text not in topics():
            raise UsageError(f"no topic {text!r}", hint=f"one of {', '.join(sorted(topics()))}")
        yield Fact(name="about", value=text, where=WHERE)
    elif name in BY_NAME and text.lower() in BY_NAME[name].answers:
        yield from BY_NAME[name].facts(text.lower(), WHERE)
    elif name in ("precision", "weights"):
        yield from _precision(name, text)
    elif name in FLAGS or name in _EXTRA:
        yield Fact(name=name, value=_boolean(name, text), where=WHERE)
    elif name in NUMBERS:
        yield Fact(name="tells", value=name, where=WHERE, words=f"{name} {text}")
        yield Fact(name=name, value=_number(name, text), where=WHERE)
    elif name in ("gpu", "hardware"):
        yield from read_hardware(text, where=WHERE)
    elif name == "optimizer":
        yield Fact(name=name, value=text.lower(), where=WHERE)
        yield from read_text(text, where=WHERE)
    elif name in TEXTS:
        yield from read_text(text, where=WHERE)
        yield from read_versions(text, where=WHERE)
    elif name.replace("_", "-") in PACKAGES:
        yield from read_versions(f"{name.replace('_', '-')} {text}", where=WHERE)
    elif name in BY_NAME:
        raise UsageError(f"{name} cannot be {text!r}", hint=f"one of {', '.join(BY_NAME[name].answers)}")
    else:
        close = difflib.get_close_matches(name, known_names(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "docs/diagnose.md lists the names"
        raise UsageError(f"no fact is called {name!r}", hint=hint)


def _precision(name: str, text: str) -> Iterator[Fact]:
    form = find_format(text)
    if not form:
        raise UsageError(
            f"{name} {text!r} is not a precision", hint="fp16, bf16, fp32 or fp8, with words such as amp or pure"
        )
    if name == "weights":
        yield Fact(name="weights", value=form, where=WHERE)
    else:
        yield from read_precision(text, where=WHERE)


def _number(name: str, text: str) -> float:
    value = as_number(text)
    if value is None:
        raise UsageError(f"{name} {text!r} is not a number", hint=f"--fact {name}=1e-4")
    return value


def _boolean(name: str, text: str) -> bool:
    if text.lower() in _YES | _NO:
        return text.lower() in _YES
    raise UsageError(f"{name} is yes or no, not {text!r}", hint=f"--fact {name}=yes")
