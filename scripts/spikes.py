"""Trains many kinds of healthy runs and counts the steps that the guard would call spikes; writes docs/guard.md.

python scripts/spikes.py             # what `make spikes` does; resumes where it stopped
python scripts/spikes.py ctc rare    # some families, printed only

A veto on a healthy run is a false one. The old way to judge, by the loss too, is counted beside it. The other side is
counted as well: steps of the same runs whose gradients are taken a hundred and a thousand times too large.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from written import ROOT, write_table

from nanproof.files import make_folder, write_atomic
from nanproof.guard.window import Window

sys.path.insert(0, str(ROOT / "benchmarks"))

SEED = 1
"""The limits were chosen by the runs of seed 0."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "spikes", help="what is there is not repeated")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    from trainings import HEALTHY

    chosen = [i for i, t in enumerate(HEALTHY) if not given.families or t.family in given.families]
    make_folder(given.out)
    if given.part is not None:
        for i in chosen[given.part :: 2]:
            run(i, given.out)
        return 0
    words = [sys.executable, __file__, *given.families, "--out", str(given.out), "--part"]
    parts = [subprocess.Popen([*words, str(n)]) for n in range(2)]
    codes = [part.wait() for part in parts]
    if any(codes):
        print("error: a training failed, see above. Next: fix it and run this again; what is done stays")
        return 2
    families = sorted({HEALTHY[i].family for i in chosen})
    rows, total, false, by_loss, missed, spikes = [], 0, 0, 0, 0, 0
    for family in families:
        curves = [json.loads((given.out / f"{i}.json").read_text()) for i in chosen if HEALTHY[i].family == family]
        counts = [judge_curve(c) for c in curves]
        steps, vetoes, loss_vetoes = (sum(c[k] for c in counts) for k in range(3))
        seen = [sum(c[3][k] for c in counts) for k in range(2)]
        tried = sum(c[4] for c in counts)
        rows.append(
            f"| {family} | {len(curves)} | {steps:,} | {vetoes} | {loss_vetoes} |"
            f" {seen[0] / tried:.0%} | {seen[1] / tried:.0%} |"
        )
        total, false, by_loss = total + steps, false + vetoes, by_loss + loss_vetoes
        missed, spikes = missed + tried - seen[1], spikes + tried
    rows.append(f"| **all** | {len(chosen)} | {total:,} | **{false}** | {by_loss} | | {1 - missed / spikes:.1%} |")
    head = "| family | runs | steps | vetoes | by the loss | 100 × seen | 1,000 × seen |"
    table = "\n".join([head, "|---|---|---|---|---|---|---|", *rows])
    print(table)
    if not given.families:
        write_table("guard.md", "spikes", table, ("torch",))
    return int(false * 100_000 > total)


def run(number: int, out: Path) -> None:
    """Train one run in this process, and keep its curve."""
    import torch
    from trainings import HEALTHY, train

    target = out / f"{number}.json"
    if target.exists():
        return
    torch.set_num_threads(1)
    curve = [(loss, norm) for _, loss, norm in train(HEALTHY[number], seed=SEED)]
    print(f"{HEALTHY[number]}: loss {curve[0][0]:.3g} → {curve[-1][0]:.3g}", flush=True)
    write_atomic(target, json.dumps(curve))


def judge_curve(curve: list[tuple[float, float]]) -> tuple[int, int, int, tuple[int, int], int]:
    """Steps, vetoes, vetoes by a limit on the loss, spikes seen (100 ×, 1,000 ×), and how many were tried."""
    window, vetoes, by_loss, seen, tried = Window(), 0, 0, [0, 0], 0
    losses: list[float] = []
    for i, (loss, norm) in enumerate(curve):
        limit = window.limits().grad_norm
        vetoes += norm > limit
        by_loss += _above_its_range(loss, losses)
        if i > 500 and i % 50 == 0:
            tried += 1
            usual = window.medians()[1]
            seen = [count + (factor * usual > limit) for count, factor in zip(seen, (100, 1000), strict=True)]
        window.add(loss=loss, grad_norm=norm)
        losses = [*losses[-127:], loss]
    return len(curve), vetoes, by_loss, (seen[0], seen[1]), tried


def _above_its_range(loss: float, recent: list[float]) -> bool:
    """Twice the median loss and twelve robust deviations: the limit that the guard does not have any more."""
    if len(recent) < 64:
        return False
    middle = sorted(recent)[len(recent) // 2]
    spread = 1.4826 * sorted(abs(v - middle) for v in recent)[len(recent) // 2]
    return loss > middle + max(12 * spread, abs(middle))


if __name__ == "__main__":
    sys.exit(main())
