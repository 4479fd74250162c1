"""nanoGPT, its speed-run descendants, and llm.c (whose z-scores in parentheses are no values)."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="nanogpt",
        needle=b"iter ",
        line=r"\biter <step>[:,]<rest>",
        sample="iter 3010: loss nan, time 1019.95ms, mfu 14.12%",
    ),
    Grammar(
        name="llm.c",
        needle=b"step ",
        line=r"\bstep\s+<step>/<last>\s*\|<rest>",
        sample="step 17/19560 | loss 10.1 (+nanz)| norm nan (+nanz)| lr 1e-05 | 1035.86 ms | 42.4% bf16 MFU",
    ),
    Grammar(
        name="llm.c-log",
        needle=b"s:",
        line=r"^\s*s:<step> (?=tel:|trl:|eva:)<rest>",
        sample="s:1000 trl:nan lr:0.0006 norm:0.31",
    ),
)
