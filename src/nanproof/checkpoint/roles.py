"""What a tensor is for, as far as its name tells."""

from __future__ import annotations

import re
from functools import lru_cache

from .report import Role

BATCHNORM = ("running_mean", "running_var", "num_batches_tracked")
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sqs")
MOMENTS = (
    *SECOND_MOMENTS,
    "exp_avg",
    "momentum_buffer",
    "exp_inf",
    "acc_delta",
    "grad_avg",
    "exp_avg_diff",
    "prev_grad",
    "step_size",
)
_NUMBER = re.compile(r"\d+")
_OPTIMIZER = re.compile(r"(?:^|[./])(?:optim\w*|opt|optimizer_states?)(?:[./]|$)|(?:^|\.)state\.\d+\.")
_EMA = re.compile(r"(?i)(?:^|[._/])(?:ema|shadow|averaged?)(?:[._/]|$)|ema_|_ema")
_BOOKKEEPING = re.compile(r"(?i)^(?:callbacks|loops|fit_loop|rng|random|log_history)|rng_state|random_state|seed")


def last(name: str) -> str:
    """The last word of a tensor's name, without the place of a piece of a sharded tensor."""
    return name.partition("@")[0].rpartition(".")[2]


def role_of(name: str, file: str = "") -> Role:
    """parameter, buffer, moment, ema, mask or other.

    >>> role_of("backbone.3.bn.running_mean"), role_of("optimizer.state.0.exp_avg"), role_of("fc.weight")
    ('buffer', 'moment', 'parameter')
    """
    return _role(_NUMBER.sub("0", name), file)


@lru_cache(maxsize=4096)  # layers differ in their numbers only
def _role(name: str, file: str) -> Role:
    word = last(name)
    if _BOOKKEEPING.search(name):
        return "other"
    if word in MOMENTS or _OPTIMIZER.search(name) or re.match(r"optimizer|.*optim_states", file):
        return "moment"
    if _EMA.search(name) or _EMA.search(file):
        return "ema"
    if word in BATCHNORM:
        return "buffer"
    return "mask" if "mask" in word else "parameter"
