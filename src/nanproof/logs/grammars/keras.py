"""Keras: below a heading ``Epoch 2/10``, one bar per epoch with running means."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="keras",
        needle=b"/",
        line=r"^\s*<inside>/(?:<length>|Unknown) (?:\[[=>.]{1,80}\]|[^\x00-\x7f][^-]{0,400}?)(?= )<rest>",
        epochs_from=1,
        sample="24992/48000 [==============>...............] - ETA: 3:04 - loss: nan - vae_r_loss: nan",
    ),
)
