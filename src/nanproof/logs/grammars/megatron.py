"""Megatron-LM, Megatron-DeepSpeed, GPT-NeoX: one line of ``|`` per iteration; validation in lines of its own.

The norm of the gradients may be that of the scaled ones; bf16 runs have no loss scale.
"""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="megatron",
        needle=b"iteration",
        line=r"\biteration\s+<step>\s*/\s*<last>\s*\|",
        sample=" iteration  7010/ 159576 | learning rate: 6.000E-05 | lm loss: 1.1420E+01 | loss scale: 2048.0 "
        "| grad norm: nan | number of skipped iterations:   1 | number of nan iterations:   0 |",
    ),
    Grammar(
        name="megatron-validation",
        needle=b"iteration",
        line=r"(?:validation|valid|test)\b[^|]{0,60}\bat iteration <step>[^|]{0,60}\|<rest>",
        judged="",
        sample=" validation loss at iteration 1000 | lm loss value: nan | lm loss PPL: 1.044E+01 |",
    ),
)
