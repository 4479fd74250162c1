"""scan over S3, as a part of what bare ranged reads reach on the same way: ``python benchmarks/run.py remote``.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import verdict

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
PACKAGES = ("s3fs", "moto")

SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from support.stores import Way, s3_server
with s3_server() as port:
    print(port, Way(port, latency=float(sys.argv[2])).port, flush=True)
    sys.stdin.read()
"""


def report(megabytes: int = 128, latency: float = 0.03, shards: int = 200, rounds: int = 5) -> str:
    """The table: one large file with and without checksums, and a checkpoint of many small ones."""
    with _server(latency) as (direct, way):
        found = _measure(direct, way, megabytes, rounds)
        many = _shards(direct, way, shards, rounds)
    size, raw, whole, fast = found
    far = f"{size / 1e6:.0f} MB, {latency * 1000:.0f} ms for each request"
    rows = [
        ("what", "to reach", "measured", ""),
        ("---",) * 4,
        (f"bare ranged reads, {far}", "", f"{size / raw / 1e6:.0f} MB/s", ""),
        ("scan with checksums", "≥ 0.8 of bare reads", f"{raw / whole:.2f}", verdict(raw / whole >= 0.8)),
        ("scan --fast", "≥ 0.8 of bare reads", f"{raw / fast:.2f}", verdict(raw / fast >= 0.8)),
        (f"{shards:,} small shards, as a part of fetching each whole", "≥ 0.8", f"{many:.2f}", verdict(many >= 0.8)),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


@contextmanager
def _server(latency: float) -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-c", SERVER, str(ROOT / "tests"), str(latency)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        direct, way = map(int, server.stdout.readline().split())
        yield direct, way
    finally:
        server.stdin.close()
        server.wait(20)


def _far(way: int) -> Any:
    """The store by the slow way, which ``s3://`` means from now on."""
    import fsspec
    import s3fs

    from support.stores import s3_settings

    settings = s3_settings(way) | {"skip_instance_cache": False}
    fsspec.config.conf["s3"] = settings
    return s3fs.S3FileSystem(**settings)


def _near(port: int) -> Any:
    import s3fs

    from support.stores import s3_settings

    return s3fs.S3FileSystem(**s3_settings(port))


def _measure(direct: int, way: int, megabytes: int, rounds: int) -> tuple[int, float, float, float]:
    """Bytes, and the best seconds of bare reads, of a scan, and of one without checksums."""
    import torch

    from nanproof.checkpoint import scan
    from nanproof.checkpoint.scan import REMOTE_JOBS
    from nanproof.checkpoint.sweep import BUFFERS

    near, far = _near(direct), _far(way)
    near.mkdir("bench")
    buffer = io.BytesIO()
    torch.save({f"layers.{i}.weight": torch.randn(1024, 2048) * 0.02 for i in range(max(1, megabytes // 8))}, buffer)
    near.pipe("bench/model.pt", buffer.getvalue())
    size, chunk = len(buffer.getvalue()), BUFFERS // REMOTE_JOBS
    raw, whole, fast = [], [], []
    for _ in range(rounds):
        raw.append(_timed(lambda: _bare(far, "bench/model.pt", size, chunk, REMOTE_JOBS)))
        whole.append(_timed(lambda: _healthy(scan("s3://bench/model.pt"))))
        fast.append(_timed(lambda: _healthy(scan("s3://bench/model.pt", fast=True))))
    return size, min(raw), min(whole), min(fast)


def _shards(direct: int, way: int, count: int, rounds: int) -> float:
    """A checkpoint of many files, as a part of fetching them whole, as many at a time."""
    import torch

    from nanproof.checkpoint import scan
    from nanproof.checkpoint.scan import REMOTE_PARTS

    near, far = _near(direct), _far(way)
    index, files = {}, {}
    for i in range(count):
        buffer = io.BytesIO()
        torch.save({f"w{i}": torch.randn(64, 64)}, buffer)
        name = f"pytorch_model-{i + 1:05}-of-{count:05}.bin"
        files[f"bench/big/{name}"] = buffer.getvalue()
        index[f"w{i}"] = name
    files["bench/big/pytorch_model.bin.index.json"] = json.dumps({"weight_map": index}).encode()
    near.pipe(files)
    raw, whole = [], []
    for _ in range(rounds):
        raw.append(_timed(lambda: _whole(far, list(files), REMOTE_PARTS)))
        whole.append(_timed(lambda: _healthy(scan("s3://bench/big"))))
    return min(raw) / min(whole)


def _whole(store: Any, paths: list[str], jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        assert all(pool.map(lambda path: len(store.cat_file(path)), paths))


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds added to each request")
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    print(report(**vars(parser.parse_args())))
