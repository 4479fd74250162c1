"""Run folders packed in one text file: their files, and the causes that are right.

for folder in load_folders(half="dev"):
    folder.write(tmp_path)  # then diagnose tmp_path
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PACKED = Path(__file__).with_name("folders.txt")
Half = Literal["dev", "kept", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """One folder: path to text, and the accepted causes, the confirmed one first."""

    name: str
    accept: tuple[str, ...]
    files: dict[str, str]
    start: str = "."
    """Where in it diagnose is called."""

    def write(self, root: Path) -> Path:
        for name, text in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if "tfevents" in path.name:
                _write_events(path, text)
            elif path.suffix == ".wandb":
                _write_wandb(path, text)
            elif path.suffix == ".safetensors":
                _write_tensors(path, text)
            else:
                path.write_text(_notebook(text) if path.suffix == ".ipynb" else text, encoding="utf-8")
        return root / self.start


def _notebook(text: str) -> str:
    """A notebook as Jupyter saves it, from blocks that begin with ``In:`` and ``Out:``."""
    cells: list[dict[str, Any]] = []
    for block in f"\n{text}".split("\nIn:\n")[1:]:
        code, _, out = block.partition("\nOut:\n")
        outputs = [{"output_type": "stream", "name": "stdout", "text": out.splitlines(keepends=True)}] if out else []
        source = code.splitlines(keepends=True)
        cells.append({"cell_type": "code", "execution_count": 1, "metadata": {}, "source": source, "outputs": outputs})
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def _write_events(path: Path, text: str) -> None:
    """A file of TensorBoard, from lines ``step tag value``, by TensorBoard's own writer."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=0.0, file_version="brain.Event:2").SerializeToString())
        for step, tag, value in (line.split() for line in text.splitlines()):
            scalar = Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
            writer.write(Event(wall_time=float(step), step=int(step), summary=scalar).SerializeToString())


def _write_wandb(path: Path, text: str) -> None:
    """An offline file of W&B, from lines ``step tag value``, in one block of LevelDB's framing."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: dict[int, Record] = {}
    for step, tag, value in (line.split() for line in text.splitlines()):
        record = rows.setdefault(int(step), Record())
        record.history.step.num = int(step)
        record.history.item.add(key=tag, value_json=value)
    data = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for record in rows.values():
        body = record.SerializeToString()
        data += struct.pack("<IHB", zlib.crc32(body, zlib.crc32(b"\x01")), len(body), 1) + body
    assert len(data) < 32_768, "more than a block"
    path.write_bytes(data)


def _write_tensors(path: Path, text: str) -> None:
    """A file of safetensors in float32, from lines ``name value value ...``."""
    header: dict[str, Any] = {}
    data = b""
    for name, *values in (line.split() for line in text.splitlines()):
        more = struct.pack(f"<{len(values)}f", *map(float, values))
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def load_folders(path: Path = PACKED, *, half: Half = "all") -> list[Folder]:
    """The folders of a packed file (odd numbers are kept back), or of a directory with truth.json."""
    if path.is_dir():
        return list(_read_directory(path))
    found = list(_unpack(path.read_text(encoding="utf-8")))
    if half == "all":
        return found
    return [f for f in found if (int(f.name) % 2 == 1) == (half == "kept")]


def _read_directory(root: Path) -> Iterator[Folder]:
    for name, truth in json.loads((root / "truth.json").read_text(encoding="utf-8")).items():
        files = {
            str(p.relative_to(root / name)): p.read_text(encoding="utf-8")
            for p in sorted((root / name).rglob("*"))
            if p.is_file()
        }
        yield Folder(name=name, accept=tuple(truth["accept"]), files=files)


def _unpack(text: str) -> Iterator[Folder]:
    for block in text.split("\n@@@ ")[1:]:
        head, _, body = block.partition("\n")
        name, causes, source = (part.strip() for part in head.split("|", 2))
        files = {}
        for part in f"\n{body}".split("\n@@ ")[1:]:
            path, _, content = part.partition("\n")
            files[path.strip()] = "\n".join(_expand(content.rstrip("\n").split("\n"))) + "\n"
        start = source.partition(" @ ")[2] or "."
        yield Folder(name=name, accept=tuple(causes.split(",")), files=files, start=start)


def _expand(lines: list[str]) -> Iterator[str]:
    """``%% range(3): step {i}`` stands for three lines."""
    for line in lines:
        if not line.startswith("%% "):
            yield line
            continue
        span, _, template = line[3:].partition(": ")
        for i in eval(span, {"range": range}):
            yield eval(
                "f" + repr(template).replace("\\\\n", "\\n").replace("\\\\t", "\\t"),
                {"i": i, "max": max, "min": min, "chr": chr},
            )
