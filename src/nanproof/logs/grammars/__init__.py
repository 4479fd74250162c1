"""The layouts of text logs that have something of their own: one small file each, tried in this order.

Whatever is written as pairs of names and numbers beside a step needs no grammar: the reader of plain pairs takes it.
A grammar is for what pairs do not tell: a step in brackets, a counter that starts again with every epoch, a line of
validation that looks like one of training, a line that counts although it holds no loss.
"""

from __future__ import annotations

from ...plugins import plugins
from ..grammar import Grammar
from . import (
    deepspeed,
    detectron,
    espnet,
    examples,
    fairseq,
    keras,
    lightning,
    megatron,
    nanogpt,
    olmo,
    openmmlab,
    restoration,
    timm,
)

GRAMMARS: tuple[Grammar, ...] = (
    *megatron.GRAMMARS,
    *deepspeed.GRAMMARS,
    *fairseq.GRAMMARS,
    *nanogpt.GRAMMARS,
    *openmmlab.GRAMMARS,
    *detectron.GRAMMARS,
    *timm.GRAMMARS,
    *lightning.GRAMMARS,
    *keras.GRAMMARS,
    *olmo.GRAMMARS,
    *restoration.GRAMMARS,
    *espnet.GRAMMARS,
    *examples.GRAMMARS,
    *plugins("grammars", Grammar),
)
