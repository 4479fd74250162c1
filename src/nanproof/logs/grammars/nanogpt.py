"""nanoGPT, its speed-run descendants, and llm.c (whose z-scores in parentheses are no values)."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="nanogpt",
        needle=b"iter ",
        line=rb"\biter (?P<step>\d{1,18})[:,](?P<rest>.*)",
        sample="iter 3010: loss nan, time 1019.95ms, mfu 14.12%",
    ),
    Grammar(
        name="llm.c",
        needle=b"step ",
        line=rb"\bstep\s{1,9}(?P<step>\d{1,18})/(?P<last>\d{1,18})\s{0,9}\|(?P<rest>.*)",
        sample="step 17/19560 | loss 10.1 (+nanz)| norm nan (+nanz)| lr 1e-05 | 1035.86 ms | 42.4% bf16 MFU",
    ),
    Grammar(
        name="llm.c-log",
        needle=b"s:",
        line=rb"^\s{0,9}s:(?P<step>\d{1,18}) (?P<rest>(?:tel|trl|eva|vel):.*)",
        sample="s:1000 tel:3.8210",
    ),
)
