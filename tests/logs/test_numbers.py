"""Numbers and names as logs write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanproof.logs import numbers
from nanproof.logs.names import meaning


@pytest.mark.parametrize(
    "word", ["nan", "NaN", "NAN", "nan.0", "-nan", "+nan", "-1.#IND", "1.#QNAN", "1.#IND00", "nan(ind)"]
)
def test_not_a_number(word: str) -> None:
    assert math.isnan(numbers.parse(word.encode()) or 0.0)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("Infinity", math.inf),
        ("-Infinity", -math.inf),
        ("inf.0", math.inf),
        ("1.#INF", math.inf),
        ("-1.#INF00", -math.inf),
        ("1e999", math.inf),
        ("-1E999", -math.inf),
        ("1,024.0", 1024.0),
        ("1,048,576", 1048576.0),
        ("5.98e-4", 5.98e-4),
        ("1.1420E+01", 11.42),
        (".5", 0.5),
        ("3.", 3.0),
        ("+7", 7.0),
        ("-0.0", 0.0),
    ],
)
def test_numbers(word: str, value: float) -> None:
    assert numbers.parse(word.encode()) == value


@pytest.mark.parametrize(
    "word", ["1_0", "٣", "１２", "1,5", "12:30", "v2", "0x10", "1.2.3", "nano", "info", "1e", "", "--1", "1.#", "∞"]
)
def test_what_is_no_number(word: str) -> None:
    assert numbers.parse(word.encode()) is None


@given(st.floats(allow_nan=False) | st.integers(-(10**18), 10**18))
def test_what_python_prints_comes_back(value: float) -> None:
    assert numbers.parse(repr(value).encode()) == float(value)
    assert numbers.of(str(value)) == float(value)


@given(st.binary(max_size=40))
def test_any_bytes(data: bytes) -> None:
    value = numbers.parse(data)
    assert value is None or isinstance(value, float)


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("loss", "loss Loss train_loss train/loss loss/train total_loss lm_loss train_loss_step avr_loss trl"),
        ("component", "loss_cls box_loss train/dfl_loss l_pix losses/policy_loss value_loss nll_loss D_loss loss_G"),
        ("eval", "eval_loss val_loss eval/loss valid_loss val/box_loss tel validation_loss loss/val test_loss"),
        ("grad_norm", "grad_norm gnorm norm optim/total_grad_norm train/grad_norm gradient_norm grad_norm_0"),
        ("lr", "lr LR learning_rate lr-AdamW lr/pg0 optim/learning_rate_group0 train_lr lr_0 optim0_lr0"),
        ("loss_scale", "loss_scale scale amp_scaler grad_scale scaler fp16/loss_scale"),
        ("skipped", "skipped skipped_steps num_skipped overflows"),
        ("epoch", "epoch Epoch train/epoch"),
        ("time", "_timestamp timestamp wall_time"),
        ("other", "ppl accuracy loss_weight aux_loss_coef lr_decay params_norm grad_norm/layer.0 best_loss"),
    ],
)
def test_names_have_their_meaning(role: str, names: str) -> None:
    assert {name: meaning(name).role for name in names.split()} == dict.fromkeys(names.split(), role)


def test_names_of_several_words() -> None:
    spoken = {
        "lm loss": "loss",
        "learning rate": "lr",
        "grad norm": "grad_norm",
        "loss scale": "loss_scale",
        "number of skipped iterations": "skipped",
        "number of nan iterations": "nan_count",
        "KLD Loss": "component",
        "lm-loss-training/lm loss": "loss",
        "lm-loss-validation/lm loss validation": "eval",
        "Training Loss": "loss",
        "Validation Loss": "eval",
        "params norm": "other",
        "Value function loss": "component",
    }
    assert {name: meaning(name).role for name in spoken} == spoken
