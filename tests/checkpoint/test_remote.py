"""scan over a real S3 protocol: ranges at the same time, broken connections, a server that is gone."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanproof.checkpoint import scan, scan_series
from nanproof.errors import UsageError
from support.stores import Way, s3_server, s3_settings

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    import s3fs

    with s3_server() as port:
        store = s3fs.S3FileSystem(**s3_settings(port))
        store.mkdir("bucket")
        torch.manual_seed(0)
        for i in range(3):
            buffer = io.BytesIO()
            state = {f"layers.{k}.weight": torch.randn(160, 160) for k in range(60)}
            if i == 2:
                state["layers.7.weight"][3, 4] = float("nan")
            torch.save(state, buffer)
            store.pipe(f"bucket/run/step_{i}.pt", buffer.getvalue())
        shards = {}
        for i in range(12):
            buffer = io.BytesIO()
            torch.save({f"w{i}": torch.randn(40, 40)}, buffer)
            name = f"pytorch_model-{i + 1:05}-of-00012.bin"
            store.pipe(f"bucket/big/{name}", buffer.getvalue())
            shards[f"w{i}"] = name
        store.pipe("bucket/big/pytorch_model.bin.index.json", json.dumps({"weight_map": shards}).encode())
        yield port


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes ``s3://`` mean a server, by way of a proxy with faults."""
    import fsspec

    ways = []

    def use(port: int, **faults: Any) -> Way:
        way = Way(port, **faults)
        ways.append(way)
        monkeypatch.setitem(fsspec.config.conf, "s3", s3_settings(way.port))
        return way

    yield use
    for way in ways:
        way.close()


def test_a_series_in_a_bucket(server: int, through: Any) -> None:
    through(server)
    series = scan_series("s3://bucket/run")
    assert [(r.name, r.health) for r in series] == [
        ("step_0.pt", "healthy"),
        ("step_1.pt", "healthy"),
        ("step_2.pt", "corrupt"),
    ]
    assert series.reports[2].bad[0].name == "layers.7.weight"
    assert [r.health for r in scan_series("s3://bucket/run/step_[01].pt")] == ["healthy", "healthy"]
    sharded = scan("s3://bucket/big")
    assert (sharded.health, len(sharded.tensors), len(sharded.files)) == ("healthy", 12, 12)


def test_a_way_with_latency_costs_few_round_trips(server: int, through: Any) -> None:
    way = through(server, latency=0.01)
    assert scan("s3://bucket/run/step_0.pt").health == "healthy"
    assert way.requests < 60 + 40  # 60 members have a header each; nothing else is asked for one by one


def test_broken_connections_are_tried_again(server: int, through: Any) -> None:
    way = through(server, breaks=3)
    assert scan("s3://bucket/run/step_2.pt").health == "corrupt"
    assert way.count >= 3


def test_a_server_that_is_gone_is_a_network_error(server: int, through: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    way = through(server)
    way.close()
    with pytest.raises(UsageError, match=r"cannot be reached: network error.*check the address"):
        scan("s3://bucket/run/step_0.pt")


def test_a_missing_key_is_nothing_at_that_place(server: int, through: Any) -> None:
    through(server)
    with pytest.raises(UsageError, match="nothing at s3://bucket/none"):
        scan("s3://bucket/none")
