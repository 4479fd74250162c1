"""A training run dies of one empty sentence; guarded it lives; repaired it never notices.

A small classifier averages word vectors over the words that a mask leaves. Now and then a sentence is empty,
its mean is 0/0, and in the plain loop that single NaN ends the run: every weight is NaN one step later.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanproof import Guard, ops

STEPS, VOCABULARY, LENGTH, BATCH = 300, 50, 12, 32


def make_batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sentences of one of two kinds of words, a mask of the words that count, and the kind."""
    g = torch.Generator().manual_seed(step)
    kind = torch.randint(0, 2, (BATCH,), generator=g)
    words = torch.randint(0, VOCABULARY // 2, (BATCH, LENGTH), generator=g) + kind[:, None] * (VOCABULARY // 2)
    noise = torch.rand(BATCH, LENGTH, generator=g) < 0.4
    words = torch.where(noise, torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=g), words)
    lengths = torch.randint(1, LENGTH + 1, (BATCH,), generator=g)
    lengths[0] = torch.where(torch.tensor(step % 60 == 59), 0, lengths[0])  # an empty sentence, now and then
    return words, torch.arange(LENGTH) < lengths[:, None], kind


class Classifier(nn.Module):
    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.safe = safe
        self.embed, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 2)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        vectors = self.embed(words)
        if self.safe:
            mean = ops.masked_mean(vectors, mask[..., None], dim=1)
        else:
            mean = (vectors * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits: Tensor = self.out(mean)
        return logits


def train(*, guarded: bool, safe: bool, run_dir: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Classifier(safe=safe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, max_norm=1.0, run_dir=run_dir) if guarded else None
    died, loss = None, math.nan
    for step in range(STEPS):
        words, mask, kind = make_batch(step)

        def loss_of(words: Tensor = words, mask: Tensor = mask, kind: Tensor = kind) -> Tensor:
            return nn.functional.cross_entropy(model(words, mask), kind)

        if guard is not None:
            guard.step(loss_of, batch={"words": words, "mask": mask, "kind": kind})
        else:
            optimizer.zero_grad()
            value = loss_of()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss = float(value.detach())
            died = step if died is None and not math.isfinite(loss) else died
    if guard is not None:
        guard.close()
    words, mask, kind = make_batch(10_001)
    accuracy = float((model(words, mask).argmax(1) == kind).float().mean())
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return {
        "died": "—" if died is None else f"step {died}",
        "skipped": guard.tally.actions["skip"] if guard else 0,
        "weights": "finite" if finite else "NaN",
        "accuracy": f"{accuracy:.0%}",
    }


def main() -> None:
    logging.basicConfig(format="    %(message)s")
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        print("1. The plain loop: backward, clip, step.")
        rows["plain"] = train(guarded=False, safe=False, run_dir=Path(folder))
        print(f"   died at {rows['plain']['died']}; weights are {rows['plain']['weights']} from there on.\n")
        print("2. The same loop under nanproof: guard.step(closure) in place of backward, clip, step.")
        run_dir = Path(folder) / "guarded"
        rows["guarded"] = train(guarded=True, safe=False, run_dir=run_dir)
        incident = sorted((run_dir / "incidents").iterdir())[0]
        record = json.loads((incident / "incident.json").read_text())
        print(f"   first incident: {sorted(p.name for p in incident.iterdir())}")
        verdict = record["verdict"]
        place = record["location"]
        print(f"   verdict: {verdict['kind']} {verdict['level']}, origin: {verdict['origin']}")
        print(f"   located: {Path(place['file']).name}:{place['line']}, {place['mechanism']}: {place['why']}")
        print(f"   verified by replay: {place['verified']}\n")
        print("3. The cause repaired: ops.masked_mean in place of sum / count.")
        rows["repaired"] = train(guarded=True, safe=True, run_dir=Path(folder) / "repaired")
        print("   nothing to veto.\n")
    print(f"{'run':<10}{'died at':>10}{'skipped':>9}{'weights':>9}{'accuracy':>10}")
    for name, row in rows.items():
        print(f"{name:<10}{row['died']:>10}{row['skipped']:>9}{row['weights']:>9}{row['accuracy']:>10}")


if __name__ == "__main__":
    main()
