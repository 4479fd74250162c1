"""BasicSR and its relatives: epoch and iteration in one bracket, losses named ``l_pix``."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="basicsr",
        needle=b"iter:",
        line=r"\[epoch:\s*<epoch>, ?iter:\s*<step>, ?<rest>",
        sample="2023-06-15 21:08:18,450 INFO: [debug..][epoch:  0, iter:   1,649, lr:(2.000e-04,)] l_pix: nan",
    ),
)
