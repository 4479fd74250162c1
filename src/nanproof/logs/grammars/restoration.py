"""BasicSR and its relatives: epoch and iteration in one bracket, losses named ``l_pix``."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="basicsr",
        needle=b"iter:",
        line=rb"\[epoch:\s{0,9}(?P<epoch>[\d,]{1,12}), ?iter:\s{0,9}(?P<step>[\d,]{1,18}), ?(?P<rest>.*)",
        sample="2023-06-15 21:08:18,450 INFO: [debug..][epoch:  0, iter:   1,649, lr:(2.000e-04,)] [eta: 5 days, time (data): 4.499 (1.987)] l_pix: nan",
    ),
)
