"""Rubbish of every kind, in the shapes that logs have."""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

from logs.samples import CASES

GOOD = "".join(text for text, _, _ in CASES.values()).encode()


def tfrecord(data: bytes, *, broken: bool = False) -> bytes:
    from nanproof.logs.readers.tensorboard import _masked_crc

    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked_crc(length) ^ broken) + data + b"\0\0\0\0"


def event(step: int, tag: bytes, value: float) -> bytes:
    """A scalar event as TensorBoard writes it."""
    summary = b"\x0a" + bytes([len(tag) + 7]) + b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", value)
    number = bytes([step & 0x7F | 0x80, step >> 7 & 0x7F])
    return b"\x09" + struct.pack("<d", 1e9 + step) + b"\x10" + number + b"\x2a" + bytes([len(summary)]) + summary


def events(count: int) -> bytes:
    return b"".join(tfrecord(event(s, b"train/loss", float("nan") if s == 7 else 1.0)) for s in range(count))


def seeds() -> dict[str, bytes]:
    """Good files to be spoiled."""
    rows = [{"step": s, "loss": 1.0 / (s + 1), "grad_norm": 2.0, "epoch": s / 10} for s in range(200)]
    jsonl = "".join(json.dumps(r | ({"loss": float("nan")} if r["step"] == 50 else {})) + "\n" for r in rows).encode()
    state = json.dumps({"global_step": 9, "log_history": rows, "max_steps": 9}, indent=2).encode()
    return {
        "text": GOOD,
        "jsonl": jsonl,
        "state": state,
        "events": events(100),
        "gzip": gzip.compress(jsonl),
        "csv": b"step,loss,lr\n" + b"".join(b"%d,%s,0.1\n" % (s, b"nan" if s == 50 else b"1.5") for s in range(200)),
        "wandb": wandb(b"\x12\x10\x0a\x0e\x12\x04loss\x82\x01\x03NaN" * 20),
        "utf16": GOOD.decode().encode("utf-16"),
    }


def wandb(record: bytes) -> bytes:
    import zlib

    head = struct.pack("<IHB", zlib.crc32(record, zlib.crc32(b"\x01")), len(record), 1)
    return b":W&B\xe1\xbe\x00" + (head + record) * 10


def spoiled(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Files that are truncated, flipped, shuffled, stuffed and mixed; the same for the same seed."""
    dice = random.Random(seed)
    good = seeds()
    for i in range(count):
        name = dice.choice(list(good))
        data = bytearray(good[name])
        for _ in range(dice.randint(1, 4)):
            place = dice.randrange(len(data) + 1)
            match dice.randrange(7):
                case 0:
                    del data[place:]
                case 1 if data:
                    for _ in range(dice.choice([1, 8, 64])):
                        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
                case 2:
                    data[place:place] = dice.randbytes(dice.choice([1, 100, 5000]))
                case 3:
                    del data[place : place + dice.choice([1, 10, 1000])]
                case 4:
                    data[place:place] = good[dice.choice(list(good))][: dice.choice([10, 1000, 10**6])]
                case 5:
                    data[place:place] = dice.choice(BITES) * dice.choice([1, 3, 500])
                case _:
                    data = data[place:] + data[:place]
        yield f"{i:05d}-{name}", bytes(data)


BITES = (
    b"\0",
    b"\r",
    b"\n",
    b"\b",
    b"\x1b[",
    b"\x1b[31m",
    b"\x1b]0;",
    b"{",
    b"}",
    b'{"loss":',
    b"[[[[",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"loss: ",
    b"nan ",
    b"loss nan ",
    b"1e999 ",
    b"%|",
    b"| 1/2 [",
    b"Epoch ",
    b"-" * 50,
    b"| a | b |\n",
    b"\xf0\x9f",
    b"1,000,",
    b"Traceback (most recent call last):\n",
    b'  File "x", line 1, in y\n',
    b"iter 99999999999999999999999: loss 1\n",
    b"step -5 loss: 3\n",
    b"step 1e300 loss: 3\n",
    b'{"step": 1e400, "loss": 1}\n',
    b'{"step": -9e18, "loss": 1}\n',
    b'{"epoch": 1e400, "loss": 1}\n',
    b'{"epoch": NaN, "loss": 1}\n',
    b"epoch nan loss: 1\n",
    b"Epoch inf/3 loss 1\n",
    b"2024-13-45 99:99:99 iter 3: loss 2\n",
    b"[2024-00-00T00:00:00] iter 4: loss 2\n",
)


def databases(folder: Path) -> Iterator[Path]:
    """SQLite files that are hostile or broken."""
    slow = folder / "slow.db"
    with sqlite3.connect(slow) as connection:
        connection.execute(
            "CREATE VIEW metrics AS WITH RECURSIVE r(run_name, step, metrics, timestamp) AS"
            " (SELECT 'a', 1, '{}', 1 UNION ALL SELECT run_name, step + 1, metrics, timestamp FROM r) SELECT * FROM r"
        )
    connection.close()
    wrong = folder / "wrong.db"
    with sqlite3.connect(wrong) as connection:
        connection.execute("CREATE TABLE metrics (run_name, step, metrics, timestamp)")
        rows = [
            ("a", "x", "{", None),
            ("a", None, b"\xff", 3),
            ("a", 1e300, "[1]", "y"),
            ("a", 5, '{"loss": "NaN"}', 1),
        ]
        connection.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
    connection.close()
    lies = folder / "lies.db"
    with sqlite3.connect(lies) as connection:
        connection.execute("CREATE TABLE metrics (key, value, timestamp, run_uuid, step, is_nan)")
        connection.execute("CREATE TABLE runs (run_uuid, name, status, start_time)")
        connection.execute("INSERT INTO runs VALUES ('r', NULL, 'FAILED', 'x')")
        rows = [
            (None, "x", 1, "r", 1, 0),
            ("loss", 1.0, "now", "r", 1, 0),
            ("loss", 1.0, 1, "r", "z", 0),
            ("loss", 0.0, 2, "r", 7, 1),
        ]
        connection.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
    connection.close()
    cut = folder / "cut.db"
    cut.write_bytes(lies.read_bytes()[:1500])
    other = folder / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE users (name)")
    connection.close()
    yield from (slow, wrong, lies, cut, other)
