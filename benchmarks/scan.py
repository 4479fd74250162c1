"""How fast ``nanproof scan`` is beside what limits it and beside torch, and how much memory it takes.

    python benchmarks/scan.py            prints the table
    python benchmarks/scan.py --write    also puts it into docs/scan.md

Everything is measured in one run, in turns, with the page cache warm; the table gives ratios, which mean the same
on another machine. The limit is reading the same bytes from the page cache into a reused buffer with the same
number of threads and doing nothing with them.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nanproof.checkpoint import scan
from nanproof.checkpoint.sweep import default_jobs
from nanproof.files import write_atomic

if TYPE_CHECKING:
    import torch

GB = 1 << 30
ROUNDS = 5
GENERATIONS = 3  # of processes: where the buffers of one lie in memory favours it for its whole life
DOCS = Path(__file__).parent.parent / "docs" / "scan.md"
BEGIN, END = "<!-- measured by benchmarks/scan.py -->", "<!-- end of measured part -->"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8 e4m3": "float8_e4m3fn"}
Row = tuple[str, str, str, str]


def weights(dtype: torch.dtype, size: int, spread: float = 0.02) -> dict[str, torch.Tensor]:
    """Matrices as a model has them; fp8 is stored with scales and fills its whole range."""
    import torch

    torch.manual_seed(0)
    base = torch.randn(4096, 2048) * (100 if dtype.itemsize == 1 else spread)
    one = base.clamp(-448, 448).to(dtype)
    return {f"layers.{i}.weight": one.clone() for i in range(size // one.nbytes)}


def stream_safetensors(path: Path, one: torch.Tensor, size: int) -> None:
    """A file larger than memory should be asked for: the same matrix under many names, written piece by piece."""
    import torch

    raw = one.view(torch.uint8).numpy().tobytes()
    names = [f"layers.{i}.weight" for i in range(size // len(raw))]
    entries = {
        n: {"dtype": "BF16", "shape": list(one.shape), "data_offsets": [i * len(raw), (i + 1) * len(raw)]}
        for i, n in enumerate(names)
    }
    head = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for _ in names:
            file.write(raw)


def read_only(path: Path, threads: int, chunk: int) -> float:
    """Seconds to read a file into reused buffers and do nothing with it."""
    fd, size, block = os.open(path, os.O_RDONLY), path.stat().st_size, 16 << 20
    starts, lock = iter(range(0, size, block)), threading.Lock()

    def work() -> None:
        # from the middle of a page on, away from where the bytes lie in theirs: some processors copy slowly otherwise
        buffer = memoryview(mmap.mmap(-1, chunk + 4096))[256:]
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            for at in range(start, min(start + block, size), chunk):
                os.preadv(fd, [buffer[: min(chunk, size - at)]], at)

    began = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(fd)
    return time.perf_counter() - began


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def against_the_limit(path: Path, threads: int) -> tuple[float, float]:
    """Speed of the scan over the speed of the limit, without and with checksums: the mean over some processes."""
    command = [sys.executable, __file__, "--one", str(path), "--threads", str(threads)]
    runs = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(GENERATIONS)]
    return statistics.mean(r[0] for r in runs), statistics.mean(r[1] for r in runs)


def one_process(path: Path, threads: int) -> tuple[float, float]:
    """The same in this process, which must not have loaded torch: the best of rounds taken in turns."""
    assert "torch" not in sys.modules
    limit, fast, full = [], [], []
    read_only(path, threads, 1 << 20)
    for _ in range(ROUNDS):
        for chunk in (256 << 10, 1 << 20, 2 << 20):  # as often as the scan: the best of more tries is better
            limit.append(read_only(path, threads, chunk))
            fast.append(timed(lambda: scan(path, fast=True, jobs=threads)))
        full.append(timed(lambda: scan(path, jobs=threads)))
    return min(limit) / min(fast), min(limit) / min(full)


def child(*command: str) -> float:
    """Seconds of a process from start to end, with as many threads as it likes."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return timed(
        lambda: subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, env=environment, check=True)
    )


LOADERS = {
    "torch zip": 'torch.load(path, weights_only=True, map_location="cpu")',
    "safetensors": 'safetensors.torch.load_file(path, device="cpu")',
}
TORCH = """
import sys, torch{imports}
path = sys.argv[1]
state = {load}
assert all(bool(torch.isfinite(t).all()) for t in state.values())
"""


def against_torch(path: Path, kind: str) -> tuple[float, float]:
    """How many times longer loading and testing takes than the scan, without and with checksums, start included."""
    program = TORCH.format(imports=", safetensors.torch" if kind == "safetensors" else "", load=LOADERS[kind])
    command = str(Path(sys.executable).with_name("nanproof"))
    peer, fast, full = [], [], []
    for _ in range(3):
        peer.append(child("-c", program, str(path)))
        fast += [child(command, "scan", "--fast", str(path)) for _ in range(3)]
        full.append(child(command, "scan", str(path)))
    loading = statistics.median(peer)
    return loading / statistics.median(fast), loading / statistics.median(full)


# The peak of this very program: what getrusage tells also counts the process that started it.
PEAK = """
import sys, atexit
words = lambda: next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()
atexit.register(lambda: print(words()[1], file=sys.stderr))
if len(sys.argv) > 1:
    from nanproof.cli import main
    main()
"""


def memory_row(what: str, path: Path) -> Row:
    """Peak memory of ``nanproof scan`` over that of an interpreter that does nothing."""

    def peak(*arguments: str) -> int:
        run = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True)
        return int(run.stderr.split()[-1])

    more = (peak("scan", str(path)) - peak()) / 1024
    return row(what, f"{more:.0f} MB", "≤ 128 MB", more <= 128)


def row(what: str, measured: str, aim: str = "", reached: bool | None = None) -> Row:
    verdict = "" if reached is None else "reached" if reached else "**not reached**"
    return what, measured, aim, verdict


def measure(folder: Path, size: int) -> Iterator[Row]:
    import torch
    from safetensors.torch import save_file

    jobs = default_jobs()
    path = folder / "weights.bin"
    for name, dtype in DTYPES.items():
        for kind in ("safetensors", "torch zip"):
            state = weights(getattr(torch, dtype), size)
            save_file(state, path) if kind == "safetensors" else torch.save(state, path)
            del state
            for threads in sorted({1, jobs}):
                fast, full = against_the_limit(path, threads)
                crc = f", {full:.2f} × with checksums" if kind == "torch zip" else ""
                what = f"{name} {kind}, {size / GB:g} GB, {threads} threads"
                yield row(what, f"{fast:.2f} × the limit{crc}", "≥ 0.6", fast >= 0.6)
            if name in ("fp32", "bf16"):
                fast, full = against_torch(path, kind)
                peer = f"{'torch.load' if kind == 'torch zip' else 'safetensors'} + isfinite"
                crc = f", {full:.0f} × with checksums" if kind == "torch zip" else ""
                aim = ("≥ 20", fast >= 20) if kind == "torch zip" else ()
                what = f"{name} {kind}, {size / GB:g} GB, process start included"
                yield row(what, f"{fast:.0f} × as fast as {peer}{crc}", *aim)
    state = weights(torch.bfloat16, size, spread=3.0)
    save_file(state, path)
    del state
    fast, _ = against_the_limit(path, jobs)
    yield row(f"bf16 safetensors with values above 2, {jobs} threads", f"{fast:.2f} × the limit")
    yield memory_row(f"memory, {size / GB:g} GB", path)
    stream_safetensors(path, next(iter(weights(torch.bfloat16, 32 << 20).values())), 4 * size)
    yield memory_row(f"memory, {4 * size / GB:g} GB", path)
    path.unlink()
    yield from measure_many(folder)


def measure_many(folder: Path) -> Iterator[Row]:
    import torch
    from safetensors.torch import save_file

    for kind, save in (("torch zip", torch.save), ("safetensors", save_file)):
        path = folder / "many.bin"
        seconds = []
        for count in (25_000, 100_000):
            save({f"layers.{i}.weight": torch.randn(8, 8) for i in range(count)}, path)
            seconds.append(min(timed(lambda p=path: scan(p)) for _ in range(2)))
        yield memory_row(f"memory, 100,000 tensors, {kind}", path)
        times = seconds[1] / seconds[0]
        yield row(f"time for 4 × the tensors, {kind}", f"{times:.1f} ×", "linear: 4, at most 5", times <= 5)
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/scan.md")
    parser.add_argument("--size", type=float, default=2.0, help="gigabytes of a file")
    parser.add_argument("--one", type=Path, metavar="FILE", help="measure one file in this process")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_process(options.one, options.threads)))
        return
    rows: list[Row] = [("what", "measured", "to reach", ""), ("---",) * 4]
    with tempfile.TemporaryDirectory() as folder:
        for one in measure(Path(folder), int(options.size * GB)):
            rows.append(one)
            print(*one, sep="   ", flush=True)
    if options.write:
        table = "\n".join(f"| {' | '.join(r)} |" for r in rows)
        page = DOCS.read_text()
        head, _, rest = page.partition(BEGIN)
        write_atomic(DOCS, f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
