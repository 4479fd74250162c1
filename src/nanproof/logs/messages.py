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


class Found(NamedTuple):
    """A message that was recognised."""

    name: str
    kind: EventKind
    details: dict[str, str]


_SCALE = rf"(?P<scale>{numbers.NUMBER.decode()})"
_BEFORE = rf"(?P<before>{numbers.NUMBER.decode()})"
_BAD = r"(?:nan|inf|infinite|non-?finite)"
_STEP = r"(?:step|iteration|iter|updates?) ?[=:]? ?(?P<step>\d+)"
_TABLE: tuple[tuple[str, EventKind, str], ...] = (
    # loss scaling
    ("scale-overflow", "overflow", rf"OVERFLOW!.{{0,60}}?loss scale: {_BEFORE}, reducing to {_SCALE}"),
    ("scale-overflow", "overflow", rf"OVERFLOW!.{{0,60}}?loss scale: {_SCALE}"),
    ("scale-overflow", "overflow", rf"overflow detected,? (?:setting|skipping).{{0,40}}?loss scale to:? ?{_SCALE}"),
    ("scale-overflow", "overflow", rf"gradient overflow.{{0,80}}?loss scale to:? ?{_SCALE}"),
    ("scale-overflow", "overflow", rf"reducing (?:dynamic )?loss scale (?:from {_BEFORE} )?to {_SCALE}"),
    ("scale-overflow", "overflow", r"grad(?:ient)? overflow on iteration:? (?P<step>\d+)"),
    ("scale-overflow", "overflow", r"found nan, decreased lg_loss_scale to"),  # its logarithm
    ("scale-minimum", "stop", r"loss scale already at minimum|minimum loss scale reached"),
    ("scale-overflow", "overflow", r"grad(?:ient)? overflow|(?<!integer )(?<!buffer )(?<!stack )overflow detected,"),
    # Megatron computes a bad step again
    ("not-repeatable", "hardware", r"unexpected result is not reproducible|possible (?:transient|persistent) error"),
    # NaN and Inf, said outright
    ("anomaly", "nan", r"Function '(?P<op>\w+)' returned nan values"),
    ("loss-nonfinite", "nan", rf"loss became infinite or nan at {_STEP}"),
    ("loss-nonfinite", "nan", rf"loss (?:is|was|became|has become|turned|went|got) (?:now |to )?{_BAD}\b"),
    ("loss-nonfinite", "nan", rf"diverged with loss = {_BAD}"),
    ("loss-nonfinite", "nan", rf"\b{_BAD} (?:or inf )?loss\b(?!\))(?: (?:at|in|on) {_STEP})?"),
    ("grad-nonfinite", "nan", r"(?:Rank (?P<rank>\d+): )?found NaN in (?:local )?(?:grad|param|forward)"),
    ("grad-nonfinite", "nan", rf"\b{_BAD}\b.{{0,30}}gradients?\b|\bgradients?\b.{{0,40}}\b{_BAD}\b"),
    ("norm-nonfinite", "warning", r"non-?finite norm encountered|total norm of order .{0,40} is non-finite"),
    ("probabilities", "nan", r"probability tensor contains either"),
    ("distribution", "nan", r"to satisfy the constraint \w+\(.{0,40}found invalid values"),
    ("distribution", "nan", r"the parameter \w+ has invalid values"),
    ("negative-std", "nan", r"normal expects all elements of std >= 0"),
    (
        "nan-in-data",
        "nan",
        r"\b(?:nan|inf)s?\b.{0,20}\bin (?:the )?"
        r"(?:observations?|obs|batch|dataset|images?|targets?|labels?|features?)\b",
    ),
    ("nan-in-file", "nan", r"\bnan (?:detected |found )?in (?:\w+ ){0,2}\w+: ?(?P<file>\S*/\S+|\S+\.\w{2,5})"),
    ("nan-detected", "nan", r"\b(?:nans?|infs?|nan or inf|inf or nan|nan/inf)\b.{0,20}(?:detected|found|encountered)"),
    ("nan-detected", "nan", r"\bcontains? (?:nan|inf)s?\b|\bfound (?:nan|inf)\b|\bnans? in (?:input|the)\b"),
    # precision, weights, labels, kernels
    ("unscale-fp16", "exception", r"Attempting to unscale FP16 gradients"),
    (
        "newly-initialised",
        "warning",
        r"Some weights of (?P<model>\S+) were not initialized.{0,300}?newly initialized:? ?\[?(?P<names>[^\]]{0,300})",
    ),
    ("labels-masked", "warning", r"all labels in your dataset are -100"),
    ("labels-masked", "warning", r"tokenization mismatch: (?P<have>\d+) vs\.? (?P<want>\d+)"),
    ("labels-masked", "warning", r"could not find (?:response|instruction|assistant) (?:key|template|marker)"),
    ("kernel-not-built", "exception", r"kernel .{0,200}(?:is|built) for sm_?\d+|no kernel image is available"),
    ("sdpa-strides", "warning", r"cuDNN SDPA backward got grad_output\.strides"),
    ("label-assert", "exception", r"Assertion [`'\"].{0,80}(?:n_classes|< ?num_classes|cur_target).{0,40} failed"),
    ("label-assert", "exception", r"Target -?\d+ is out of bounds"),
    ("device-assert", "exception", r"device-side assert triggered"),
    # ended from outside: see OUTSIDE
    ("out-of-memory", "exception", r"out of memory"),
    ("disk-full", "exception", r"No space left on device|disk quota exceeded"),
    ("interrupted", "stop", r"\bKeyboardInterrupt\b"),
    (
        "killed",
        "stop",
        r"^(?:Killed|Terminated)$|\bCANCELLED AT\b|\boom[-_ ]?kill|\breceived (?:signal )?SIG(?:TERM|INT)\b"
        r"|\(SIGKILL\) received",
    ),
    (
        "invalid-value",
        "warning",
        r"RuntimeWarning: (?P<what>invalid value|divide by zero|overflow) encountered in (?P<where>\w+)",
    ),
    (
        "empty-split",
        "warning",
        r"\b(?:train|val|valid|test|eval|dev)\w*(?: data)?[ -]?(?:set|split|loader|data|samples)\b"
        r".{0,20}?(?:\bhas|:|=) ?0\b(?!\.)"
        r"|\b0 (?:train|val|test|eval|dev)\w* (?:samples|examples|images|batches|rows|interactions)\b"
        r"|\bmean of empty slice\b",
    ),
    ("empty-tensor", "warning", r"\btensor\(\[\](?:, |\))|torch\.Size\(\[(?:\d+, )*0(?:, \d+)*\]\)"),
    ("scheduler-order", "warning", r"`?lr_scheduler\.step\(\)`? before `?optimizer\.step\(\)"),
    (
        "checkpoint-unreadable",
        "exception",
        r"unexpected EOF, expected \d+ more bytes|PytorchStreamReader failed|archive is corrupted"
        r"|Error while deserializing header|invalid load key|unpickling stack underflow"
        r"|checksums? (?:did )?(?:not|NOT) match|checksum mismatch|integrity check failed",
    ),
    # hardware
    ("xid", "hardware", r"NVRM: Xid \([^)]{0,60}\): (?P<code>\d+)"),
    ("memory-error", "hardware", r"ECC error|uncorrectable ECC|CUDA error: (?:uncorrectable|an illegal|hardware)"),
    ("nccl", "hardware", r"NCCL (?:error|WARN)|collective.{0,40}time(?:d )?-?out"),
    # what the loop did
    ("", "rollback", rf"\b(?:rolling back|rolled back|rollback|reverting to)\b(?:.{{0,80}}?{_STEP})?"),
    ("", "skip", r"\bskip(?:ping|ped)? (?:this |the |bad |nan )?(?:step|batch|update|iteration|optimizer step)\b"),
    ("early-stopping", "stop", r"early stopping|EarlyStopping"),
    ("", "stop", r"\b(?:stopping|aborting|terminating) (?:the )?(?:training|run|job)\b|exiting run"),
    ("", "stop", r"training (?:was )?(?:stopped|aborted|interrupted)"),
    (
        "diverged",
        "stop",
        r"\b(?:model|training|run|loss|network) (?:has |have |is |was )?(?:diverged|diverging|exploded)\b",
    ),
    (
        "crashed",
        "stop",
        r"\bSIG(?:TERM|KILL|INT|ABRT|SEGV)\b|slurmstepd: error|segmentation fault|core dumped|^bus error"
        r"|illegal instruction|fatal python error|terminate called after",
    ),
    (
        "",
        "resume",
        r"\b(?:resuming|resumed|continuing|restoring|restored)\b(?! *(?:=|: *(?:none|false)))"
        rf".{{0,60}}?\b(?:from|training|states?|checkpoint|run|at)\b(?:.{{0,120}}?\b{_STEP})?",
    ),
    ("", "resume", r"\bto resume training\b|\bload(?:ed|ing) (?:the )?snapshot\b"),
    (
        "",
        "resume",
        r"\bresume (?:training )?from "
        rf"(?:\S+\.(?:pth?|ckpt|tar|bin|safetensors)\b|{_STEP}|(?:the )?checkpoint\b|local state)",
    ),
    ("", "resume", rf"\bload(?:ed|ing) (?:\w+ )?checkpoint(?! shards)\b(?:.{{0,200}}?\b{_STEP})?"),
    ("", "checkpoint", r"\b(?:sav(?:ing|ed)|wrote|writing)\b.{0,40}\b(?:checkpoint|model|state|weights)s?\b"),
    ("", "checkpoint", r"\bcheckpoint (?:was )?(?:saved|written)"),
    ("", "finished", r"training (?:has )?(?:completed|finished|complete|done)\b|`Trainer\.fit` stopped: `max_\w+=\d+`"),
)
_PATTERNS = tuple((name, kind, re.compile(pattern.encode(), re.IGNORECASE)) for name, kind, pattern in _TABLE)
# Most lines hold none of these words and are done with after one search.
_TRIGGER = re.compile(
    rb"overflow|nan|inf(?!o)|finite|loss scale|tensor contains|constraint|expects all|unscale|not initialized"
    rb"|are -100|mismatch|kernel|strides|device-side|out of memory|encountered|lr_scheduler|xid|ecc|cuda error|nccl"
    rb"|reproducible|transient|persistent|tensor\(\[\]|torch\.size\(\["
    rb"|assert|target|could not find|invalid (?:value|load)|eof|streamreader|corrupt|deserializ|underflow"
    rb"|collective|roll|revert|skip|stop|abort|terminat|exit|kill|sig[tkias]|cancel|slurm|resum|continu|restor|load"
    rb"|sav|writ|wrot|checkpoint|training|oom|warn|checksum|integrity|interrupt|no space|quota"
    rb"|has 0|\b0 (?:train|val|test|eval|dev)|(?:set|split|loader|data|samples)[:=] ?0|empty slice"
    rb"|segmentation|core dumped|bus error|illegal inst|fatal python|diverg|explod"
)
OUTSIDE = frozenset({"out-of-memory", "disk-full", "interrupted", "killed"})
"""Messages of what ends a run from outside: memory, disk, a scheduler or its user. Its numbers are not to blame."""
OWN_ERRORS = re.compile(
    r"(?:Key|Attribute|Type|Name|UnboundLocal|Import|ModuleNotFound|FileNotFound|Permission|Syntax|NotImplemented)Error\b"
)
"""What an exception of a script begins with that says nothing about its numbers."""
AFTERMATH = re.compile(
    r"ChildFailedError|CalledProcessError|SystemExit|SIGTERM|NCCL|DistBackendError|Connection(?:Reset|Refused)Error"
    r"|BrokenPipeError|EOFError|srun: error|slurmstepd: error"
)
"""What launchers and other ranks say when a process has ended."""
_WARNING = re.compile(rb"\b(?:\w*Warning:|WARNING\b|WARN\b)")
NONE = re.compile(rb"(?i)\b(?:no|not|without|zero|0|never|isn't|aren't) (?:any )?(?:nans?|infs?|non-?finite)\b")
"""What denies a NaN: "no NaN found in 300 gradients"."""
LINE = 4_096


def find(line: bytes) -> Found | None:
    """The message on a line, or None."""
    line = line[:LINE]
    if _TRIGGER.search(line.lower()) is None:
        return None
    for name, kind, pattern in _PATTERNS:
        match = pattern.search(line)
        if match is not None and not (kind == "nan" and NONE.search(line)):
            details = {k: v.decode("utf-8", "replace") for k, v in match.groupdict().items() if v is not None}
            return Found(name, kind, details)
    return Found("", "warning", {}) if _WARNING.search(line) is not None else None
