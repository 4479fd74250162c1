"""fairseq and metaseq, by version: ``key=value`` inside an epoch, a table of ``|``, JSON (read as a dict).

``loss_scale 0`` is rounding, not zero.
"""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="fairseq-inner",
        needle=b"epoch",
        line=r"\bepoch\s+<epoch>:\s*\d+\s*/\s*\d+[ ,](?=[^=]*=)<rest>",
        sample="2023-01-02 03:04:05 | train_inner | epoch 003:      5 / 356 loss=9.44, num_updates=700, gnorm=nan",
    ),
    Grammar(
        name="fairseq-table",
        needle=b"epoch",
        line=r"\|\s*epoch\s+<epoch>\s*\|<rest>",
        judged=r"\|\s*valid\b",
        sample="| epoch 028 | loss nan | nll_loss 2.204 | num_updates 9165 | lr 0.00033 | gnorm 0.635",
    ),
)
