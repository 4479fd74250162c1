"""OLMo: the step in brackets, its values behind it or below it."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="olmo",
        needle=b"[step=",
        line=rb"\[step=(?P<step>\d{1,18})(?:/(?P<last>\d{1,18}))?(?:,epoch=(?P<epoch>\d{1,9})[^\]]{0,20})?\](?P<rest>.*)",
        sample="[step=1200/739328] train/CrossEntropyLoss=nan  train/Perplexity=30.33  optim/total_grad_norm=0.81",
    ),
)
