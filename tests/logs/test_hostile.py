"""Whatever is in a file: something is read or reported, nothing crashes, memory stays bounded."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logs.corpus import BITES, GOOD, databases, event, events, spoiled, tfrecord
from logs.reading import points, read_bytes
from nanproof.errors import NanproofError
from nanproof.logs import Series, find_logs, read
from nanproof.logs.timeline import timeline
from nanproof.records import to_json

pytestmark = pytest.mark.slow

SEED, FILES = 20_262, 400


def check(series: Series) -> None:
    """What must hold of any series, and its story is told."""
    for column in series.columns.values():
        assert len(column.rows) == len(column.steps) == len(column.values) <= column.total
        assert (column.rows[1:] >= column.rows[:-1]).all()
    assert all(a.row < b.row for a, b in zip(series.events, series.events[1:], strict=False))
    story = timeline(series)
    json.dumps(to_json(story), allow_nan=False)
    assert all(m.text for m in story.moments)


def test_spoiled_files() -> None:
    for name, data in spoiled(FILES, SEED):
        try:
            check(read_bytes(data))
        except Exception as error:
            raise AssertionError(f"seed {SEED}, file {name}: {error!r}") from error


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([*BITES, GOOD[:3000], GOOD[3000:9000], b"loss", b"step", b"0", b".", b"=", b":", b" ", b"\n"]),
        max_size=30,
    )
)
def test_bites_of_logs(parts: list[bytes]) -> None:
    check(read_bytes(b"".join(parts)))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes(data: bytes) -> None:
    check(read_bytes(data))
    check(read_bytes(events(3) + data))
    check(read_bytes(b"iter 1: loss 2\n" + data + b"\niter 2: loss nan\n"))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
def test_any_text_between_records(text: str) -> None:
    noise = text.replace("\n", " ").replace("\r", " ")
    series = read_bytes(f"iter 1: loss 2.5\n{noise}\niter 2: loss nan\n".encode("utf-8", "surrogatepass"))
    assert points(series.columns.get("loss"))[0] == (1, 2.5)
    assert (2, "nan") in points(series.columns.get("loss"))


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    )
)
def test_any_json(value: object) -> None:
    check(
        read_bytes(
            b'{"step": 1, "loss": 2}\n' + json.dumps(value).encode() + b"\n" + json.dumps({"x": value}).encode() + b"\n"
        )
    )


def test_json_that_is_too_deep() -> None:
    deep = b'{"a":' * 3000 + b"1" + b"}" * 3000
    series = read_bytes(b'{"step": 1, "loss": 2.5}\n' + deep + b'\n{"step": 2, "loss": NaN}\n')
    assert points(series.loss) == [(1, 2.5), (2, "nan")]


def test_lines_of_many_megabytes_and_a_bar_without_newlines() -> None:
    long = b"x" * (9 << 20)
    series = read_bytes(b"iter 1: loss 2.5\n" + long + b"\niter 2: loss nan\n", chunk=1 << 17)
    assert points(series.loss) == [(1, 2.5), (2, "nan")]
    assert "a line of more than 4 MB was cut" in series.notes
    bar = "".join(f"\rSteps:  1%|▏  | {i}/9999 [00:01<01:40,  1.0s/it, step_loss=0.5]" for i in range(2000)).encode()
    assert len(read_bytes(bar, chunk=1 << 12).columns["step_loss"]) == 2000


def test_steps_and_clocks_that_go_back() -> None:
    lines = [f"2024-01-01 10:00:{60 - i % 60 - 1:02d} step {max(0, 50 - i)}: loss {i}.0\n" for i in range(50)]
    series = read_bytes("".join(lines).encode())
    check(series)
    assert series.loss is not None
    assert series.loss.total == 50


def test_a_damaged_event_file_is_read_up_to_the_damage() -> None:
    series = read_bytes(events(10) + tfrecord(event(10, b"train/loss", 1.0), broken=True) + events(3))
    assert series.loss is not None
    assert series.loss.steps.tolist() == list(range(10))
    assert "damaged at byte" in series.notes[0]
    cut = read_bytes(events(10)[:-3])
    assert (cut.loss or 0).total == 9  # type: ignore[union-attr]
    assert cut.notes == ("the last event is cut off",)


def test_tensors_of_tensorflow_2() -> None:
    def scalar(value: bytes) -> bytes:
        tensor = b"\x08\x01\x12\x00" + value
        inner = b"\x0a\x04loss\x42" + bytes([len(tensor)]) + tensor
        summary = b"\x0a" + bytes([len(inner)]) + inner
        return tfrecord(b"\x09" + b"\0" * 8 + b"\x10\x05\x2a" + bytes([len(summary)]) + summary)

    content, packed, two = b"\x22\x04\x00\x00\xc0\x7f", b"\x2d\x00\x00\x80\x7f", b"\x22\x08" + b"\0" * 8
    assert points(read_bytes(scalar(content) + scalar(packed) + scalar(two)).loss) == [(5, "nan"), (5, math.inf)]


def test_a_truncated_trainer_state_is_read_up_to_the_cut() -> None:
    history = [{"step": s, "loss": 1.0, "epoch": 0.1} for s in range(100)]
    whole = json.dumps({"best_metric": None, "log_history": history, "max_steps": 100}, indent=2).encode()
    series = read_bytes(whole[: len(whole) // 2])
    assert series.loss is not None
    assert 40 < series.loss.total < 60
    assert series.notes == ("the file is cut off",)


def test_a_gzip_log_and_one_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "train.log.1.gz"
    text = "".join(f"iter {i}: loss {i}.5\n" for i in range(1000)).encode()
    path.write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]))
    assert (read(path).loss or 0).total == 1000  # type: ignore[union-attr]
    path.write_bytes(gzip.compress(text)[:500] + b"rubbish" * 10)
    check(read(path))


def test_databases(tmp_path: Path) -> None:
    found = {}
    for path in databases(tmp_path):
        try:
            series = read(path)
            check(series)
            found[path.name] = (points(series.loss), [e.kind for e in series.events], bool(series.notes))
        except NanproofError as error:
            found[path.name] = type(error).__name__
    assert found["wrong.db"] == ([(5, "nan")], [], False)
    assert found["lies.db"] == ([(7, "nan")], ["stop"], False)
    assert found["slow.db"] == found["other.db"] == ([], [], True)
    assert found["cut.db"] == ([], [], True)
    assert {Path(log.path).name for log in find_logs(tmp_path)} == {"wrong.db", "lies.db"}


BOUNDED = """
    import resource, sys
    import numpy, orjson
    from nanproof.logs import find_logs, follow, read
    from nanproof.logs.timeline import timeline

    read(sys.argv[2])
    peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) >> 10
    before = peak()
    series = read(sys.argv[1])
    timeline(series)
    print(peak() - before, series.loss.total, int(series.loss.bad.sum()), len(series.loss))
"""


@pytest.mark.parametrize("form", ["jsonl", "text", "line"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, form: str) -> None:
    path, small = tmp_path / "log", tmp_path / "small"
    rows = 300_000 if form == "jsonl" else 20_000
    loss = lambda s: "nan" if s % 10_000 == 7 else "1.5"  # noqa: E731
    write = {
        "jsonl": lambda s: f'{{"step": {s}, "loss": "{loss(s)}", "grad_norm": 2.0, "lr": 0.1, "note": "{"x" * 60}"}}\n',
        "text": lambda s: f"some words before; iter {s}: loss {loss(s)}, lr 1e-3; {'y' * 300}\n",
        "line": lambda s: f"\rSteps: 1%|▏ | {s}/99999 [00:01<01:40, 1.0s/it, step_loss={loss(s)}]{' ' * 300}",
    }[form]
    with path.open("w") as file:
        for step in range(rows):
            file.write(write(step))
        file.write("\n")
    small.write_text("".join(write(s) for s in range(3)) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BOUNDED), str(path), str(small)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown, total, bad, _ = map(int, done.stdout.split())
    assert (total, bad) == (rows, rows // 10_000)
    assert grown < 48, f"{grown} MB more for a file of {path.stat().st_size >> 20} MB"
