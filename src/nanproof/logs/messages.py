"""Sentences in logs that mean something by themselves: one line of the table each.

>>> find(b"RuntimeError: Function 'SqrtBackward0' returned nan values in its 0th output.")
Found(name='anomaly', kind='nan', details={'op': 'SqrtBackward0'})

A named group of a pattern becomes a detail of the event; ``step`` sets its step, ``scale`` is a loss scale and becomes
a point of that column. The first pattern that fits wins.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from . import numbers
from .series import EventKind

_NUMBER = numbers.NUMBER.decode()


class Found(NamedTuple):
    """A message that was recognised."""

    name: str
    kind: EventKind
    details: dict[str, str]


_TABLE: tuple[tuple[str, EventKind, str], ...] = (
    # loss scaling
    ("scale-overflow", "overflow", rf"OVERFLOW!.{{0,60}}?loss scale: (?P<before>{_NUMBER}), reducing to (?P<scale>{_NUMBER})"),
    ("scale-overflow", "overflow", rf"overflow detected,? (?:setting|skipping).{{0,40}}?loss scale (?:to:?|from) (?P<scale>{_NUMBER})"),
    ("scale-overflow", "overflow", rf"gradient overflow.{{0,80}}?(?:reducing loss scale|loss scale) to:? ?(?P<scale>{_NUMBER})"),
    ("scale-minimum", "stop", r"(?:loss scale already at minimum|minimum loss scale reached).{0,40}"),
    ("scale-overflow", "overflow", r"gradient overflow|overflow detected"),
    # NaN and Inf, said outright
    ("anomaly", "nan", r"Function '(?P<op>\w+)' returned nan values"),
    ("loss-nonfinite", "nan", r"loss became infinite or nan at iteration=(?P<step>\d+)"),
    ("loss-nonfinite", "nan", r"loss (?:is|was|became|has become|turned|went|got) (?:now |to )?(?:nan|inf|infinite|non-?finite)\b"),
    ("loss-nonfinite", "nan", r"(?:nan|inf|non-?finite) (?:or inf )?loss(?: (?:at|in|on) (?:step|iter(?:ation)?) (?P<step>\d+))?"),
    ("grad-nonfinite", "nan", r"(?:Rank (?P<rank>\d+): )?found NaN in (?:local )?(?:grad|param|forward)"),
    ("grad-nonfinite", "nan", r"(?:nan|inf|non-?finite)[^\n]{0,30}gradients?\b|gradients?[^\n]{0,40}(?:\bnan\b|\binf\b|non-?finite)"),
    ("norm-nonfinite", "warning", r"non-?finite norm encountered|total norm of order .{0,40} is non-finite"),
    ("probabilities", "nan", r"probability tensor contains either"),
    ("distribution", "nan", r"to satisfy the constraint \w+\(.{0,40}found invalid values"),
    ("negative-std", "nan", r"normal expects all elements of std >= 0"),
    ("nan-in-file", "nan", r"\bnan (?:detected |found )?in (?:latents?|images?|batch|inputs?|file|sample)s?:? (?P<file>\S+[./]\S+)"),
    ("nan-detected", "nan", r"\b(?:nans?|infs?|nan or inf|inf or nan|nan/inf)\b.{0,20}(?:detected|found|encountered|in input|in the)|contains? (?:nan|inf)s?\b|found (?:nan|inf)\b"),
    # precision, weights, labels, kernels
    ("unscale-fp16", "exception", r"Attempting to unscale FP16 gradients"),
    ("newly-initialised", "warning", r"Some weights of (?P<model>\S+) were not initialized.{0,300}?newly initialized:? ?\[?(?P<names>[^\]]{0,300})"),
    ("labels-masked", "warning", r"all labels in your dataset are -100"),
    ("labels-masked", "warning", r"tokenization mismatch: (?P<have>\d+) vs\.? (?P<want>\d+)"),
    ("kernel-not-built", "exception", r"kernel .{0,200}(?:is for|was built for|built for) sm_?\d+|no kernel image is available"),
    ("sdpa-strides", "warning", r"cuDNN SDPA backward got grad_output\.strides"),
    ("device-assert", "exception", r"device-side assert triggered"),
    ("out-of-memory", "exception", r"out of memory"),
    ("invalid-value", "warning", r"RuntimeWarning: (?P<what>invalid value|divide by zero|overflow) encountered in (?P<where>\w+)"),
    ("scheduler-order", "warning", r"`?lr_scheduler\.step\(\)`? before `?optimizer\.step\(\)"),
    # hardware
    ("xid", "hardware", r"NVRM: Xid \([^)]{0,60}\): (?P<code>\d+)"),
    ("memory-error", "hardware", r"uncorrectable ECC|ECC error|CUDA error: (?:uncorrectable|an illegal instruction|hardware)"),
    ("nccl", "hardware", r"NCCL (?:error|WARN)|(?:Watchdog caught collective|collective).{0,40}time(?:d )?-?out"),
    # what the loop did
    ("", "rollback", r"\b(?:rolling back|rolled back|rollback|reverting to)\b.{0,80}?(?:(?:step|iteration|update) (?P<step>\d+))?"),
    ("", "skip", r"\bskip(?:ping|ped)? (?:this |the |bad |nan )?(?:step|batch|update|iteration|optimizer step)\b"),
    ("early-stopping", "stop", r"early stopping|EarlyStopping"),
    ("", "stop", r"\b(?:stopping|aborting|terminating) (?:the )?(?:training|run|job)\b|training (?:was )?(?:stopped|aborted|interrupted)|exiting run"),
    ("killed", "stop", r"^Killed$|\bSIG(?:TERM|KILL|INT|ABRT|SEGV)\b|slurmstepd: error|CANCELLED AT|oom-?kill"),
    ("", "resume", r"(?:resuming|resumed|continuing|restoring|restored)\b(?! *(?:=|: *(?:none|false)))[^\n]{0,60}?\b(?:from|training|states?|checkpoint|run|at)\b(?:[^\n]{0,120}?\b(?:step|iteration|iter|updates?) ?[=:]? ?(?P<step>\d+))?"),
    ("", "resume", r"(?:successfully )?load(?:ed|ing) (?:\w+ )?checkpoint(?! shards)\b[^\n]{0,200}?(?:(?:at|@|step|iteration) (?P<step>\d+))?(?: updates)?"),
    ("", "checkpoint", r"\b(?:sav(?:ing|ed)|wrote|writing)\b[^\n]{0,40}\b(?:checkpoint|model|state|weights)s?\b|checkpoint (?:was )?(?:saved|written)"),
    ("", "finished", r"training (?:has )?(?:completed|finished|complete|done)\b|`Trainer\.fit` stopped: `max_\w+=\d+` reached"),
)  # fmt: skip
_PATTERNS = tuple((name, kind, re.compile(pattern.encode(), re.IGNORECASE)) for name, kind, pattern in _TABLE)
# Most lines hold none of these words and are done with after one search.
_TRIGGER = re.compile(
    rb"(?i)overflow|\bnans?\b|\binf|finite|loss scale|tensor contains|constraint|expects all|unscale|not initialized"
    rb"|are -100|mismatch|kernel|strides|device-side|out of memory|encountered|lr_scheduler|xid|ecc|cuda error|nccl"
    rb"|collective|roll|revert|skip|stop|abort|terminat|exit|kill|sig[tkias]|cancel|slurm|resum|continu|restor|load"
    rb"|sav|wr[io]t|checkpoint|training|oom"
)
_WARNING = re.compile(rb"\b(?:\w*Warning:|WARNING\b|WARN\b)")
LINE = 4_096


def find(line: bytes) -> Found | None:
    """The message on a line, or None."""
    if _TRIGGER.search(line, 0, LINE) is not None:
        for name, kind, pattern in _PATTERNS:
            match = pattern.search(line, 0, LINE)
            if match is not None:
                details = {k: v.decode("utf-8", "replace") for k, v in match.groupdict().items() if v is not None}
                return Found(name, kind, details)
    if _WARNING.search(line, 0, LINE) is not None:
        return Found("", "warning", {})
    return None
