"""detectron2 (medians over 20 iterations) and maskrcnn-benchmark (``now (mean)``): losses by head."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="detectron",
        needle=b"iter: ",
        line=r"\biter: <step>\s+(?=total_loss|loss)<rest>",
        sample="[11/01 20:14:15 d2.utils.events]: iter: 379  total_loss: nan  loss_cls: 1.184  lr: 0.003796",
    ),
)
