"""Our readers of TensorBoard and W&B files against what those libraries read, on files cut anywhere."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof.errors import NanproofError
from nanproof.logs import read
from nanproof.logs.readers.wandb import BLOCK

VALUES = st.floats(width=32, allow_nan=True, allow_infinity=True)
ROWS = st.lists(st.tuples(st.sampled_from(["metric/a", "metric/b"]), VALUES), min_size=1, max_size=12)
Points = dict[str, list[tuple[int, str]]]


def _ours(path: Path) -> Points:
    try:
        series = read(path)
    except NanproofError:
        return {}
    return {
        name: [(int(s), repr(float(v))) for s, v in zip(column.steps, column.values, strict=True)]
        for name, column in series.columns.items()
        if name.startswith("metric/")
    }


def _events(path: Path) -> Points:
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: Points = {}
    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, repr(float(value.simple_value))))
    return found


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=ROWS, cut=st.floats(0, 1))
def test_tensorboard_reads_the_same(rows: list[tuple[str, float]], cut: float) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    with TemporaryDirectory() as folder:
        writer = EventFileWriter(folder)
        for step, (tag, value) in enumerate(rows):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=1.0 + step, summary=summary))
        writer.close()
        (path,) = Path(folder).iterdir()
        assert _ours(path) == _events(path)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * cut)])
        assert _ours(path) == _events(path)


KEYS = st.sampled_from(["metric/a", "metric/b", "metric/c"])
HISTORY = st.lists(
    st.dictionaries(KEYS, st.floats(allow_nan=True, allow_infinity=True), min_size=1), min_size=1, max_size=12
)


def _framed(records: list[bytes]) -> bytes:
    """A ``.wandb`` file: records in blocks of 32 KiB, one that does not fit is split, as LevelDB's log does."""
    data = bytearray(b":W&B\xee\xbe\x00")
    for record in records:
        first, rest = True, record
        while first or rest:
            left = BLOCK - len(data) % BLOCK
            if left < 7:
                data += bytes(left)
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = bytes([1 if first and not rest else 2 if first else 3 if rest else 4])
            data += (
                zlib.crc32(part, zlib.crc32(kind)).to_bytes(4, "little") + len(part).to_bytes(2, "little") + kind + part
            )
            first = False
    return bytes(data)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=HISTORY, cut=st.floats(0, 1), padding=st.integers(0, 40_000))
def test_wandb_reads_the_same(rows: list[dict[str, float]], cut: float, padding: int) -> None:
    """wandb has no Python reader of whole files any more: its own protobuf classes say what each record holds."""
    from wandb.proto.wandb_internal_pb2 import HistoryItem, HistoryRecord, Record

    records = [Record(num=1, uuid="x" * padding).SerializeToString()]
    for step, row in enumerate(rows):
        items = [HistoryItem(nested_key=["_step"], value_json=str(step))]
        items += [HistoryItem(nested_key=[key], value_json=json.dumps(value)) for key, value in row.items()]
        records.append(Record(num=step + 2, history=HistoryRecord(item=items)).SerializeToString())
    data = _framed(records)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run-a.wandb"
        for size in (len(data), int(len(data) * cut)):
            path.write_bytes(data[:size])
            theirs: Points = {}
            for i in range(1, len(records)):
                if len(_framed(records[: i + 1])) <= size:  # what is whole in the file
                    step, *items = Record.FromString(records[i]).history.item
                    for item in items:
                        point = (int(step.value_json), repr(float(json.loads(item.value_json))))
                        theirs.setdefault(item.nested_key[0], []).append(point)
            assert _ours(path) == theirs
