"""detectron2 (medians over 20 iterations) and maskrcnn-benchmark (``now (mean)``): losses by head."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="detectron",
        needle=b"iter: ",
        line=rb"\biter: (?P<step>\d{1,18})\s{1,9}(?P<rest>(?:total_)?loss.*)",
        sample="[11/01 20:14:15 d2.utils.events]: eta: 5:41:49  iter: 379  total_loss: nan  loss_cls: 1.184  loss_box_reg: nan  lr: 0.003796  max_mem: 3782M",
    ),
)
