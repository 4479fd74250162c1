"""Megatron-LM, Megatron-DeepSpeed, GPT-NeoX: one line of ``|`` per iteration; validation in lines of its own.

The norm of the gradients may be that of the scaled ones; bf16 runs have no loss scale.
"""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="megatron",
        needle=b"iteration",
        line=rb"\biteration\s{1,20}(?P<step>\d{1,18})\s{0,20}/\s{0,20}(?P<last>\d{1,18})\s{0,9}\|",
        sample=" iteration  7010/ 159576 | learning rate: 6.000E-05 | lm loss: 1.1420E+01 | loss scale: 2048.0 | grad norm: nan |",
    ),
    Grammar(
        name="megatron-validation",
        needle=b"iteration",
        line=rb"(?:validation|test|valid)\b[^|]{0,60}\bat iteration (?P<step>\d{1,18})[^|]{0,40}\|(?P<rest>.*)",
        judged=rb"",
        sample=" validation loss at iteration 1000 | lm loss value: 2.345678E+00 | lm loss PPL: 1.044E+01 |",
    ),
)
