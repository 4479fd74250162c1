"""Whatever the layout of a log: one value replaced by nan, and it is never called healthy."""

from __future__ import annotations

import random
import re

import pytest

from logs.reading import read_text
from nanproof.logs.grammars import GRAMMARS
from nanproof.logs.timeline import timeline

LAYOUTS = {
    "hf": "{{'loss': {0}, 'grad_norm': 1.1, 'learning_rate': 5e-05, 'epoch': 0.{1}}}",
    "hf-without-norm": "{{'loss': {0}, 'learning_rate': 5e-05, 'epoch': 0.{1}}}",
    "bare": "{1} {0}",
    "bare-colon": "{1}: {0}",
    "tensor": "{1} tensor({0}, device='cuda:0', grad_fn=<NllLossBackward0>)",
    "tacotron": "Train loss {1} {0} Grad Norm 1.234567 1.11s/it",
    "full-width": "Epoch：{1} Loss：{0}",
    "comma": "Epoch {1}, loss {0}",
    "at-step": "Loss at step {1}: {0}",
    "after": "Average loss after {1} batches: {0}",
    "darknet": " {1}: {0}, {0} avg loss, 0.001000 rate, 5.1 seconds, 64 images",
    "rvc": "2023-05-20 10:00:0{1},000\tmi\tINFO\tloss_disc={0}, loss_gen=2.1, loss_fm=3.1,loss_mel=20.1, loss_kl=1.1",
    "gan": "[1/300][{1}/464] Loss_D: {0} Loss_G: 2.1",
    "internlm": "INFO record_metrics -- tflops=63.2,step={1},loss=2.1,lr=4e-07,grad_norm={{'0_default': {0}}},micro=4",
    "chinese": "第{1}轮 损失: {0}",
    "tick": "tick {1}     kimg 89.6      loss {0}  time 7m 0s",
    "glued": "step {1} loss: {0}",
    "list": "step {1} losses: [0.51, {0}, 0.2]",
    "bar": "Epoch 1:  10%|█         | {1}/100 [00:01<00:09, 9.9it/s, loss={0}, lr=0.01]",
    "words": "training: the loss of batch {1} was {0} today",
    "arrow": "batch {1} => loss -> {0}",
    "table": "| {1} | {0} |",
    "epoch-colon": "epoch {1}: {0}",
    "norm-behind": "step {1} loss {0} grad_norm 1.1 lr 0.001",
    "step-behind": "loss {0} step {1} lr 0.001",
    "megatron": "iteration {1}/ 100 | lm loss: {0} | grad norm: 1.118 | number of nan iterations:   0 |",
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("spelling", ["nan", "NaN", "-nan", "nan.0"])
@pytest.mark.parametrize("place", [1, 4, 8])
def test_one_nan_is_seen(layout: str, spelling: str, place: int) -> None:
    if spelling == "nan.0" and layout not in (LAYOUTS["bar"], LAYOUTS["hf"], LAYOUTS["bare"]):
        pytest.skip("Lightning's bar alone writes that")
    heading = "| step | loss |\n|---|---|\n" if layout is LAYOUTS["table"] else ""
    rows = [layout.format(spelling if i == place else f"{2.5 - i / 10:.3f}", i) for i in range(1, 9)]
    story = timeline(read_text(heading + "\n".join(rows) + "\n"))
    assert story.outcome not in ("healthy", "empty"), rows[place - 1]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.name)
def test_the_sample_of_each_grammar_is_not_healthy_with_its_nan(grammar: object) -> None:
    sample = grammar.sample  # type: ignore[attr-defined]
    assert re.search(r"(?i)nan|inf", sample)
    assert timeline(read_text(sample + "\n")).outcome not in ("healthy", "empty")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_without_a_nan_none_is_seen(layout: str) -> None:
    heading = "| step | loss |\n|---|---|\n" if layout is LAYOUTS["table"] else ""
    rows = [layout.format(f"{2.5 - i / 10:.3f}", i) for i in range(1, 9)]
    series = read_text(heading + "\n".join(rows) + "\n")
    assert not timeline(series).of("nonfinite", "message", "hidden-nan", "dead")


NAMES = (
    "loss",
    "Loss",
    "train_loss",
    "total_loss",
    "avg loss",
    "Cost",
    "objective",
    "grad norm",
    "gnorm",
    "val_loss",
    "Training Loss",
    "l_total",
    "loss/train",
    "mean_loss",
    "ce",
    "kl_loss",
    "eval_loss",
    "losses.total",
    "ELBO",
    "nll",
    "perplexity",
    "d_loss",
)
BETWEEN = (": ", "=", " = ", " ", " - ", " -> ", "\t", " | ", ":", " : ", " is ", " ~ ", "=> ")
SPELLINGS = (
    "nan",
    "NaN",
    "NAN",
    "-nan",
    "+nan",
    "nan%",
    "-nan(ind)",
    "1.#QNAN",
    "-1.#IND",
    "tensor(nan)",
    "NaN.",
    "nan,",
    "tensor(nan, device='cuda:0')",
    "[nan]",
    "(nan)",
    "'nan'",
    "np.float64(nan)",
    "array(nan)",
    "np.nan",
    "nan (nan)",
    "nan±nan",
    "<nan>",
)
BEFORE = (
    "",
    "[{i}] ",
    "step {i} ",
    "Epoch {i}: ",
    "Iter {i}/100 ",
    "2024-01-02 10:00:{i:02d} INFO ",
    "{i}) ",
    "epoch={i}, ",
    "[Train] [{i}] ",
    "#{i} ",
    ">>> it {i} | ",
    "Round {i} -- ",
    "rank0: step {i}: ",
    "E{i} acc 0.31 ",
)
AFTER = (
    "",
    " lr 0.001",
    " grad_norm 1.1",
    " step 7",
    " batch 3/40",
    " iter 9 lr 0.1",
    " | grad norm: 0.5",
    ", acc: 0.5",
    " (1.2s/it)",
    " | time 3.4",
    " ok",
    ", lr=1e-4, mem=12GB",
)


@pytest.mark.parametrize("seed", range(12))
def test_one_nan_in_layouts_that_nobody_wrote(seed: int) -> None:
    """Names, separators, spellings and surroundings put together at random."""
    dice = random.Random(seed)
    for _ in range(60):
        name, between, spelling = dice.choice(NAMES), dice.choice(BETWEEN), dice.choice(SPELLINGS)
        before, after, count = dice.choice(BEFORE), dice.choice(AFTER), dice.randint(1, 12)
        place = dice.randint(1, count)
        rows = [
            f"{before.format(i=i)}{name}{between}{spelling if i == place else f'{2.5 - i / 10:.3f}'}{after}"
            for i in range(1, count + 1)
        ]
        assert timeline(read_text("\n".join(rows) + "\n")).outcome not in ("healthy", "empty"), rows


@pytest.mark.parametrize(
    "text",
    [
        "step 1 loss 2.0\nskipping nan checks is off\nstep 2 loss 1.9\n",
        "Namespace(nan_policy='skip', loss='ce')\nstep 1 loss 2.0\nstep 2 loss 1.9\n",
        "found no nan in 300 gradients\nstep 1 loss 2.0\nstep 2 loss 1.9\n",
    ],
)
def test_words_about_nan_are_no_nan(text: str) -> None:
    assert timeline(read_text(text)).outcome == "healthy"


def test_a_nan_before_a_bar_whose_names_mean_nothing() -> None:
    bar = "  0%|          | {i}/800 [00:02<50:11,  2.2s/it]"
    rows = [f"d: {1.3 + i / 10:.4f}; g: 0.7; r1: 0.01:{bar.format(i=i)}" for i in range(1, 6)]
    assert timeline(read_text("\r".join(rows) + "\n")).outcome in ("empty", "healthy")
    assert timeline(read_text("\r".join([*rows, "d: nan; g: 0.7; r1: nan:" + bar.format(i=6)]) + "\n")).moments
