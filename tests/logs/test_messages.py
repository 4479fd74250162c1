# ruff: noqa: E501  (log lines are long by nature)
"""Sentences that mean something by themselves, and those that only look like it."""

from __future__ import annotations

import pytest

from logs.reading import points, read_text
from nanproof.logs.messages import find

KNOWN = {
    "[2024-01-02] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 64, reducing to 32": (
        "scale-overflow",
        "overflow",
        {"before": "64", "scale": "32"},
    ),
    "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, but hysteresis is 2. Reducing hysteresis to 1": (
        "scale-overflow",
        "overflow",
        {"scale": "65536"},
    ),
    "Reducing dynamic loss scale from 65536 to 32768.0": (
        "scale-overflow",
        "overflow",
        {"before": "65536", "scale": "32768.0"},
    ),
    "| WARNING: overflow detected, setting loss scale to: 0.0625": ("scale-overflow", "overflow", {"scale": "0.0625"}),
    "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0": (
        "scale-overflow",
        "overflow",
        {"scale": "32768.0"},
    ),
    "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.": (
        "scale-minimum",
        "stop",
        {},
    ),
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.": (
        "scale-minimum",
        "stop",
        {},
    ),
    "RuntimeError: Function 'SqrtBackward0' returned nan values in its 0th output.": (
        "anomaly",
        "nan",
        {"op": "SqrtBackward0"},
    ),
    "FloatingPointError: Loss became infinite or NaN at iteration=137!": ("loss-nonfinite", "nan", {"step": "137"}),
    "Loss is nan, stopping training": ("loss-nonfinite", "nan", {}),
    "WARNING: non-finite loss at step 12, ending training": ("loss-nonfinite", "nan", {"step": "12"}),
    "AssertionError: Rank 11: found NaN in local grad norm in backward pass": ("grad-nonfinite", "nan", {"rank": "11"}),
    "FutureWarning: Non-finite norm encountered in torch.nn.utils.clip_grad_norm_; continuing anyway": (
        "norm-nonfinite",
        "warning",
        {},
    ),
    "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0": ("probabilities", "nan", {}),
    "ValueError: Expected parameter loc (Tensor of shape (64, 6)) of distribution Normal(...) to satisfy the constraint "
    "Real(), but found invalid values: tensor([[nan, ...]])": ("distribution", "nan", {}),
    "RuntimeError: normal expects all elements of std >= 0.0": ("negative-std", "nan", {}),
    "RuntimeError: NaN detected in latents: /path/img.jpg": ("nan-in-file", "nan", {"file": "/path/img.jpg"}),
    "Warning: NaN or Inf found in input tensor.": ("nan-detected", "nan", {}),
    "ValueError: Attempting to unscale FP16 gradients.": ("unscale-fp16", "exception", {}),
    "Some weights of XForY were not initialized from the model checkpoint at m and are newly initialized: ['head.weight']": (
        "newly-initialised",
        "warning",
        {"model": "XForY", "names": "'head.weight'"},
    ),
    "WARNING: tokenization mismatch: 385 vs. 399. (ignored)": (
        "labels-masked",
        "warning",
        {"have": "385", "want": "399"},
    ),
    "Unsloth: All labels in your dataset are -100. Training losses will be all 0.": ("labels-masked", "warning", {}),
    "FATAL: kernel `fmha` is for sm80-sm100, but was built for sm121": ("kernel-not-built", "exception", {}),
    "UserWarning: cuDNN SDPA backward got grad_output.strides() != output.strides()": ("sdpa-strides", "warning", {}),
    "RuntimeError: CUDA error: device-side assert triggered": ("device-assert", "exception", {}),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": ("out-of-memory", "exception", {}),
    "RuntimeWarning: invalid value encountered in log": (
        "invalid-value",
        "warning",
        {"what": "invalid value", "where": "log"},
    ),
    "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`.": (
        "scheduler-order",
        "warning",
        {},
    ),
    "Segmentation fault (core dumped)": ("crashed", "stop", {}),
    "terminate called after throwing an instance of 'c10::Error'": ("crashed", "stop", {}),
    "Model diverged, exiting.": ("diverged", "stop", {}),
    "NVRM: Xid (PCI:0000:90:1c): 64, pid=1": ("xid", "hardware", {"code": "64"}),
    "Rolling back to step 400 after 3 bad steps": ("", "rollback", {"step": "400"}),
    "NaN gradients, skipping this batch": ("grad-nonfinite", "nan", {}),
    "skipping step: norm too large": ("", "skip", {}),
    "  Continuing training from global step 500": ("", "resume", {"step": "500"}),
    "Resuming from checkpoint runs/a/epoch_28.pth": ("", "resume", {}),
    "  successfully loaded checkpoint from /ckpt at iteration 7000": ("", "resume", {"step": "7000"}),
    "Restoring states from the checkpoint path at /a/last.ckpt": ("", "resume", {}),
    "Saving model checkpoint to out/checkpoint-500": ("", "checkpoint", {}),
    "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2024-01-01T00:00:00 ***": ("killed", "stop", {}),
    "`Trainer.fit` stopped: `max_epochs=2` reached.": ("", "finished", {}),
    "UserWarning: something else": ("", "warning", {}),
}


@pytest.mark.parametrize("line", KNOWN)
def test_known_messages(line: str) -> None:
    found = find(line.encode())
    assert found is not None
    assert (found.name, found.kind, found.details) == KNOWN[line]


@pytest.mark.parametrize(
    "line",
    [
        "INFO: all is well",
        "resume_from_checkpoint: None",
        "resume_from_checkpoint=False",
        "num_nan: 0",
        "information gain 3",
        "Loading checkpoint shards: 100%",
        "learning rate 0.1",
        "Epoch 3 of 10",
        "financial data",
        "nanoseconds: 12",
    ],
)
def test_what_is_no_message(line: str) -> None:
    assert find(line.encode()) is None


def test_a_message_with_numbers_is_a_record_as_well() -> None:
    series = read_text("step 500: loss 2.5\nWARNING skipping batch 12: loss nan\nstep 501: loss 2.4\n")
    assert points(series.loss) == [(500, 2.5), (500, "nan"), (501, 2.4)]
    assert len(series.segments) == 1
    assert [(e.kind, e.step, e.line) for e in series.events] == [("skip", 500, 2)]


def test_what_the_guard_says_on_the_console_is_an_event_and_no_metric() -> None:
    series = read_text(
        "step 108: loss 2.5\nnanproof: step 110: nonfinite loss -inf → skip (the update would have been harmful); runs/a/incidents/000110\n"
        "step 109: loss -inf\n[rank1]: nanproof: step 1,200: spike in loss: 9.5 → rollback (three in a row)\nstep 110: loss 2.4\n"
        "nanproof: 300 steps, 299 updates, 1 skipped\n  why: 1 × nonfinite loss\n  next: nanproof diagnose runs/a\n  loss: nan\n"
    )
    assert points(series.loss) == [(108, 2.5), (109, float("-inf")), (110, 2.4), (110, "nan")]
    assert [(e.kind, e.step, e.line) for e in series.events] == [("nan", 110, 2), ("rollback", 1200, 4)]
    assert len(series.segments) == 1  # the script counts from 0, the guard from 1
    assert [name for name in series.columns if "loss" in name] == ["loss"]


def test_a_traceback_is_one_event_with_its_innermost_line() -> None:
    series = read_text(
        "step 1: loss 2.5\n[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/a/train.py", line 12, in <module>\n[rank0]:     main()\n'
        '[rank0]:   File "/a/model.py", line 99, in forward\n[rank0]:     return x / 0\n'
        "[rank0]: mylib.errors.Trouble: no luck\nstep 2: loss 2.4\nRuntimeError: alone\n"
    )
    assert [(e.kind, e.details, e.line) for e in series.events] == [
        ("exception", {"error": "Trouble", "where": "/a/model.py:99"}, 7),
        ("exception", {"error": "RuntimeError"}, 9),
    ]
    assert points(series.loss) == [(1, 2.5), (2, 2.4)]


def test_overflows_between_bars_stand_where_the_bar_stands() -> None:
    bar = "  3%|▎         | {}/1042 [01:07<36:11,  2.15s/it]"
    series = read_text(
        bar.format(31)
        + "\r{'loss': 2.0, 'epoch': 0.1}\n\r"
        + bar.format(31)
        + "\r"
        + bar.format(37)
        + "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 64, reducing to 32\n"
    )
    assert points(series.loss_scale) == [(37, 32.0)]
    assert [(e.kind, e.step) for e in series.events] == [("overflow", 37)]
