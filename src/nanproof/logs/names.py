"""What a name in a log means: the one table of aliases that all readers share.

>>> meaning("train/loss").role, meaning("lm loss").role, meaning("loss_box_reg").role, meaning("eval_loss").role
('loss', 'loss', 'component', 'eval')
>>> meaning("gnorm").role, meaning("lr-AdamW").role, meaning("loss scale").role, meaning("tok/s").role
('grad_norm', 'lr', 'loss_scale', 'other')
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

Role = Literal[
    "loss", "component", "eval", "grad_norm", "lr", "loss_scale", "skipped", "nan_count", "epoch", "time", "other"
]

STEP_KEYS = (
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "step",
    "current_steps",
    "global_step/max_steps",
    "global_steps",
    "train_step",
    "train/step",
    "num_updates",
    "iteration",
    "iterations",
    "iter",
    "train_iter",
    "global_iter",
    "total_timesteps",
    "time/total_timesteps",
    "update",
    "updates",
    "n_iter",
    "it",
    "itr",
    "steps",
    "batch",
    "batch_idx",
    "batch_id",
    "s",
    "_step",
)
"""What counts steps, best first. W&B's own ``_step`` counts calls of ``log``, so it comes last."""
LAST_STEP_KEYS = (
    "max_steps",
    "total_steps",
    "num_training_steps",
    "max_iter",
    "max_iters",
    "total_iters",
    "total_optimization_steps",
)
LOGGING_KEYS = ("logging_steps",)
EPOCH_KEYS = ("epoch", "train/epoch", "ep", "num_epoch", "current_epoch")
TIME_KEYS = ("_timestamp", "timestamp", "wall_time", "walltime", "wall time", "unix_time")
MODE_KEYS = ("mode", "split", "phase", "stage")
IGNORED = frozenset(
    {
        "eta",
        "elapsed",
        "remaining",
        "elapsed_time",
        "remaining_time",
        "percentage",
        "v_num",
        "rank",
        "verdict",
        "action",
    }
)

_EVAL = frozenset(
    {"eval", "val", "valid", "validation", "validate", "test", "dev", "evaluation", "tel", "vel", "holdout"}
)
_AVERAGED = frozenset({"avr", "avg", "average", "running", "mean", "smoothed"})
# Words that say how a value was taken, not what it is.
_DECORATION = frozenset(
    {
        "train",
        "training",
        "tr",
        "trn",
        "step",
        "epoch",
        "avg",
        "average",
        "avr",
        "mean",
        "running",
        "smoothed",
        "smooth",
        "batch",
        "iter",
        "iteration",
        "current",
        "cur",
        "curr",
        "log",
        "metrics",
        "metric",
        "losses",
        "stats",
        "per",
        "interval",
        "reduced",
        "the",
        "is",
        "at",
        "of",
        "now",
        "this",
        "info",
        "raw",
        "global",
        "median",
        "unscaled",
        "model",
        "optim",
        "optimizer",
        "optimization",
        "trainer",
        "final",
        "last",
        "local",
        "sum",
        "rank",
    }
)
_NOT_A_LOSS = frozenset(
    {
        "scale",
        "scaler",
        "weight",
        "weights",
        "coef",
        "coefficient",
        "coeff",
        "fn",
        "func",
        "function",
        "type",
        "mult",
        "factor",
        "time",
        "ratio",
        "gain",
        "alpha",
        "beta",
        "lambda",
        "delta",
        "threshold",
        "wt",
        "ppl",
        "perplexity",
        "tokens",
        "count",
        "num",
        "name",
        "mask",
        "std",
        "var",
        "diff",
        "change",
        "acc",
        "accuracy",
        "min",
        "max",
    }
)
_RECORDS = frozenset({"best", "min", "max", "target", "lowest", "minimum"})
_LOSS_WORDS = frozenset({"nll", "kld", "bce", "mse", "mae", "ce", "cost", "objective", "verlust", "perte", "perda"})
_PADDLE = frozenset({"batch", "data", "reader"})
_TOTAL = (
    "loss",
    "total loss",
    "trl",
    "tloss",
    "lm loss",
    "loss total",
    "totalloss",
    "cross entropy loss",
    "cross entropy",
    "crossentropyloss",
    "ce loss",
    "language loss",
    "mlm loss",
    "ntp loss",
)
_GRAD = re.compile(
    r"(?:(?:total )?(?:grads?|gradients?)(?: total)?(?: l2)? ?norms?|gnorm|norm|total norm|gradnorm)"
    r"(?: (?:before|after|pre|post|un)? ?clip(?:ped|ping)?)?(?: \d+)?"
)
_LR = re.compile(
    r"(?:optim\d* )?(?:lrs?\d*|learning rates?|learningrate)"
    r"(?: (?!decay|sched|scale|mult|min|max|end|warm|layer).*)?|pg\d+"
)
_SCALE = re.compile(r"(?:(?:amp|fp16|grad|loss|dynamic) ?)*scaler?(?: scale)?(?: \d+)?")
_TIMES = r"(?: (?:iterations?|iters?|steps?|batches|updates?|count))"
_SKIPPED = re.compile(rf"(?:number |num |n )?(?:skipped|skips|overflows?){_TIMES}?")
_BAD = r"(?:nans?|infs?|nonfinite|non finite)"
_HOLDERS = r"(?: (?:params?|parameters|grads?|gradients|weights|tensors|values|elements|losses|samples))"
_SHARE = "(?:frac|fraction|ratio|percent|pct|share)"
_NAN_COUNT = re.compile(
    rf"{_SHARE} (?:of )?{_BAD}|{_BAD} {_SHARE}"
    rf"|(?:number |num |n ){_BAD}(?:{_TIMES}|{_HOLDERS})?|{_BAD}(?:{_TIMES}|{_HOLDERS})(?: count)?"
)
_ROLES: tuple[tuple[re.Pattern[str], Role], ...] = (
    (_SKIPPED, "skipped"),
    (_NAN_COUNT, "nan_count"),
    (_SCALE, "loss_scale"),
    (_LR, "lr"),
)
_SPLIT = re.compile(r"[\W_]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])")


class Meaning(NamedTuple):
    """What a column is; of several columns with one role the one with the lowest rank is used."""

    role: Role
    rank: int = 0


@lru_cache(maxsize=4096)
def meaning(name: str) -> Meaning:
    """The role of a column by its name; the names of the tools differ, the words in them much less."""
    plain = name.strip().lower()
    if plain in TIME_KEYS:
        return Meaning("time")
    if plain in EPOCH_KEYS:
        return Meaning("epoch", EPOCH_KEYS.index(plain))
    words = _words(name)
    last = _words(name.rpartition("/")[2])
    found = _role(last, not _EVAL.isdisjoint(words))
    if found.role == "other" and last != words:  # loss/train, lr/pg0
        found = _role(words, not _EVAL.isdisjoint(words))
    return found._replace(rank=found.rank + len(words)) if found.role != "other" else found


def _words(name: str) -> list[str]:
    return [w for w in _SPLIT.split(_CAMEL.sub(" ", name).lower()) if w]


def _role(words: list[str], judged: bool) -> Meaning:
    kept = [w for w in words if w not in _DECORATION and w not in _EVAL]
    if len(kept) > 1 and kept[-1] == "value":
        kept.pop()
    text = " ".join(kept)
    if judged and words and words[-1] in ("tel", "vel"):  # llm.c
        return Meaning("eval")
    for pattern, role in _ROLES:
        if pattern.fullmatch(text):
            return Meaning(role)
    if _GRAD.fullmatch(text) and not judged:
        return Meaning("grad_norm", 10 * any(w.startswith("clip") for w in words))
    if not kept or kept[-1] in _NOT_A_LOSS or kept[0] in _RECORDS:
        return Meaning("other")
    if "cost" in words and not _PADDLE.isdisjoint(words):  # a time
        return Meaning("other")
    if text in _TOTAL:
        # of equals, the plainest: "loss" before "train/loss" before "train_loss_epoch"
        rank = _TOTAL.index(text) * 20 + 10 * ("epoch" in words) + 5 * (not _AVERAGED.isdisjoint(words))
        return Meaning("eval" if judged else "loss", rank)
    if any(w.endswith("loss") or w in _LOSS_WORDS for w in kept) or (kept[0] == "l" and len(kept) > 1):
        return Meaning("eval" if judged else "component")
    return Meaning("other")


def pick(names: Iterable[str], keys: tuple[str, ...]) -> str | None:
    """The first of ``keys`` that is among the names, whatever its case."""
    lower = {n.strip().lower(): n for n in names}
    return next((lower[k] for k in keys if k in lower), None)


def is_eval(word: object) -> bool:
    """Whether a mode, a split or a phase is one of judging rather than training."""
    return isinstance(word, str) and word.strip().lower() in _EVAL
