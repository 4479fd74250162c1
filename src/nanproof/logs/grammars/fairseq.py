"""fairseq and metaseq, by version: ``key=value`` inside an epoch, a table of ``|``, JSON (read as a dict).

``loss_scale 0`` is rounding, not zero.
"""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="fairseq-inner",
        needle=b"epoch",
        line=rb"\bepoch\s{1,9}(?P<epoch>\d{1,9}):\s{0,20}\d{1,18}\s{0,9}/\s{0,9}\d{1,18}[ ,](?P<rest>.*=.*)",
        sample="2023-01-02 03:04:05 | INFO | train_inner | epoch 003:      5 / 356 loss=9.44, num_updates=700, lr=0.000175, gnorm=nan",
    ),
    Grammar(
        name="fairseq-table",
        needle=b"epoch",
        line=rb"\|\s{0,9}epoch\s{1,9}(?P<epoch>\d{1,9})\s{0,9}\|(?P<rest>.*)",
        judged=rb"\|\s{0,9}valid(?: on|\b)|\bvalid on\b",
        sample="| epoch 028 | loss 3.976 | nll_loss 2.204 | num_updates 9165 | lr 0.00033 | gnorm 0.635 | loss_scale 0.000",
    ),
)
