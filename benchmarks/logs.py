"""How fast logs are read, beside the quickest way to look at the same bytes, and in how much memory.

    python benchmarks/logs.py                                prints the table
    python benchmarks/logs.py --size 0.05 --scalars 5000     the same, small

The variants take turns in one run; what is printed are ratios of CPU time, which mean the same on another machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import orjson
from measure import verdict
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter

from nanproof.logs import read

PACKAGES = ("orjson", "tensorboard", "numpy")
ROUNDS = 3
GB = 10**9
Row = tuple[str, str, str, str]

PEAK = """
import sys
from nanproof.logs import read
series = read(sys.argv[1])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) >> 10, series.loss.total, int(series.loss.bad.sum()))
"""
EMPTY = (
    "import numpy, orjson, nanproof.logs; print(next(l for l in open('/proc/self/status') if 'VmHWM' in l).split()[1])"
)


def write_jsonl(path: Path, size: int) -> int:
    """A log as trainers write it, with a NaN in every 100,000th line; returns the number of lines."""
    lines = written = 0
    with path.open("wb") as file:
        while written < size:
            rows = []
            for step in range(lines, lines + 10_000):
                loss = math.nan if step % 100_000 == 777 else 2 + math.exp(-step / 1e5) + step % 97 / 1e3
                rows.append(
                    json.dumps(
                        {
                            "step": step,
                            "loss": loss,
                            "grad_norm": 1 + step % 13 / 10,
                            "learning_rate": 1e-4 * 0.999 ** (step % 5000),
                            "epoch": step / 5000,
                            "loss_scale": 65536.0,
                            "tokens_per_second": 12345.6 + step % 7,
                        }
                    )
                )
            written += file.write(("\n".join(rows) + "\n").encode())
            lines += len(rows)
    return lines


def write_events(folder: Path, scalars: int) -> Path:
    """An event file with five tags, as torch writes it."""
    with SummaryWriter(str(folder)) as writer:
        for step in range(scalars // 5):
            for tag in ("train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "train/loss_scale"):
                writer.add_scalar(tag, math.nan if step == 777 else step, step)
    return next(folder.iterdir())


def by_json(path: Path) -> None:
    """What a script of ten lines does."""
    with path.open("rb") as file:
        for line in file:
            json.loads(line)


def by_orjson(path: Path) -> None:
    """The least that can be done with every line: parse it."""
    with path.open("rb") as file:
        for line in file:
            try:
                orjson.loads(line)
            except orjson.JSONDecodeError:
                json.loads(line)


def by_tensorboard(path: Path) -> None:
    for _ in EventFileLoader(str(path)).Load():
        pass


def cpu(work: Callable[[Path], object], path: Path) -> float:
    start = time.process_time()
    work(path)
    return time.process_time() - start


def ratio(work: Callable[[Path], object], other: Callable[[Path], object], path: Path, rounds: int = ROUNDS) -> float:
    """How many times longer ``work`` takes than ``other``: the median of rounds in which both had their turn."""
    return statistics.median(cpu(work, path) / cpu(other, path) for _ in range(rounds))


def memory(path: Path) -> tuple[int, int, int]:
    """The peak of a process that reads the log, above one that only imports, in MB; points and bad points."""
    bare = int(subprocess.run([sys.executable, "-c", EMPTY], capture_output=True, check=True).stdout) >> 10
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, check=True)
    peak, points, bad = map(int, done.stdout.split())
    return peak - bare, points, bad


def measure(size: int, scalars: int) -> list[Row]:
    rows: list[Row] = [("what", "measured", "to reach", ""), ("---",) * 4]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        lines = write_jsonl(path, size)
        told = f"JSONL, {size / GB:.2g} GB, {lines:,} lines"
        slower = ratio(read, by_orjson, path)
        aim = ("≤ 3 ×", verdict(slower <= 3))
        rows.append((f"{told}: time beside parsing every line with orjson", f"{slower:.2f} ×", *aim))
        slower = ratio(read, by_json, path, rounds=1)
        rows.append((f"{told}: time beside parsing every line with json", f"{slower:.2f} ×", "", ""))
        more, points, bad = memory(path)
        written = (points + 99_222) // 100_000
        kept = f"{more} MB above the imports; {bad} of {written} NaN kept"
        rows.append((f"{told}: memory", kept, "≤ 128 MB, no NaN lost", verdict(more <= 128 and bad == written)))
        path.unlink()
        file = write_events(Path(folder) / "tb", scalars)
        faster = ratio(by_tensorboard, read, file)
        aim = ("≥ 4 ×", verdict(faster >= 4))
        rows.append((f"TensorBoard, {scalars:,} scalars: EventFileLoader beside this", f"{faster:.1f} ×", *aim))
    return rows


def report(size: float = 1.0, scalars: int = 200_000) -> str:
    rows = measure(int(size * GB), scalars)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.0, help="of the JSONL file, in GB")
    parser.add_argument("--scalars", type=int, default=200_000)
    options = parser.parse_args()
    print(report(options.size, options.scalars))
