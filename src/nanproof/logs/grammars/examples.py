"""The loops of PyTorch's tutorials, from which most research code grew."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="pytorch-example",
        needle=b"poch",
        line=rb"(?i:\btrain(?:ing)? epoch):? {0,9}(?P<epoch>\d{1,9})\s{0,9}\[\s{0,9}(?P<inside>\d{1,15})/(?P<length>\d{1,15})[^\]]{0,20}\](?P<rest>.*)",
        epochs_from=1,
        sample="Train Epoch: 3 [8400/60000 (14%)]\t KLD Loss: nan \t NLL Loss: nan",
    ),
    Grammar(
        name="pytorch-tutorial",
        needle=b"] loss",
        line=rb"^\s{0,9}\[(?P<epoch>\d{1,9}),\s{0,9}(?P<inside>\d{1,15})\] (?P<rest>loss.*)",
        sample="[1,  2000] loss: nan",
    ),
)
