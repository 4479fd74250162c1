"""Lightning's rich bar; its tqdm bar is read as any bar."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="lightning-rich",
        needle=b"Epoch ",
        line=r"\bEpoch <epoch>(?:/-?\d+)?\s+[^\x00-\x7f][^\[\]]{0,600}?\s<inside>/<length> +\d+:\d\d:\d\d <rest>",
        sample="Epoch 2/9  ━━━━━━━━━━╸━━━━━━━ 123/300 0:00:21 • 0:00:30 5.81it/s v_num: 7.000 train_loss: nan",
    ),
)
