"""scan over S3, as a part of what bare ranged reads reach on the same way: ``python benchmarks/remote.py``.

A moto server runs in a process of its own behind a proxy that delays every request. Bare reads and scans take turns;
both have the same number of requests under way, of the same size, through the same library.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from support.stores import Way, s3_server
with s3_server() as port:
    print(port, Way(port, latency=float(sys.argv[2])).port, flush=True)
    sys.stdin.read()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds added to each request")
    parser.add_argument("--shards", type=int, default=0, help="also scan a checkpoint of so many small shards")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    command = [sys.executable, "-c", SERVER, str(ROOT / "tests"), str(options.latency)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        direct, way = map(int, server.stdout.readline().split())
        measure(direct, way, options)
    finally:
        server.stdin.close()
        server.wait(20)


def measure(direct: int, way: int, options: argparse.Namespace) -> None:
    import fsspec
    import s3fs
    import torch

    from nanproof.checkpoint import scan
    from nanproof.checkpoint.scan import REMOTE_JOBS
    from nanproof.checkpoint.sweep import BUFFERS
    from support.stores import s3_settings

    near = s3fs.S3FileSystem(**s3_settings(direct))
    near.mkdir("bench")
    buffer = io.BytesIO()
    count = max(1, options.megabytes // 8)
    torch.save({f"layers.{i}.weight": torch.randn(1024, 2048) * 0.02 for i in range(count)}, buffer)
    near.pipe("bench/model.pt", buffer.getvalue())
    settings = s3_settings(way) | {"skip_instance_cache": False}
    fsspec.config.conf["s3"] = settings
    far = s3fs.S3FileSystem(**settings)
    size, chunk = len(buffer.getvalue()), BUFFERS // REMOTE_JOBS
    raw, whole, fast = [], [], []
    for _ in range(options.rounds):
        raw.append(_timed(lambda: _bare(far, "bench/model.pt", size, chunk, REMOTE_JOBS)))
        whole.append(_timed(lambda: _healthy(scan("s3://bench/model.pt"))))
        fast.append(_timed(lambda: _healthy(scan("s3://bench/model.pt", fast=True))))
    print(f"{size / 1e6:.0f} MB, {options.latency * 1000:.0f} ms for each request, {REMOTE_JOBS} requests at once")
    print(f"bare ranged reads {size / min(raw) / 1e6:.0f} MB/s")
    print(f"scan with checksums {min(raw) / min(whole):.2f} of that, --fast {min(raw) / min(fast):.2f}")
    if options.shards:
        _shards(near, options)


def _shards(near: Any, options: argparse.Namespace) -> None:
    import torch

    from nanproof.checkpoint import scan

    index = {}
    for i in range(options.shards):
        buffer = io.BytesIO()
        torch.save({f"w{i}": torch.randn(64, 64)}, buffer)
        name = f"pytorch_model-{i + 1:05}-of-{options.shards:05}.bin"
        near.pipe(f"bench/big/{name}", buffer.getvalue())
        index[f"w{i}"] = name
    near.pipe("bench/big/pytorch_model.bin.index.json", json.dumps({"weight_map": index}).encode())
    began = time.perf_counter()
    report = scan("s3://bench/big")
    seconds = time.perf_counter() - began
    print(f"{options.shards:,} shards: {report.health}, {len(report.tensors):,} tensors, {seconds:.1f} s")


def _bare(store: Any, path: str, size: int, chunk: int, jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        done = pool.map(
            lambda at: len(store.cat_file(path, start=at, end=min(at + chunk, size))), range(0, size, chunk)
        )
        assert sum(done) == size


def _healthy(report: Any) -> None:
    assert report.health == "healthy", report.reasons


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
