"""A seeded corpus of hostile and broken checkpoints: at least two thousand files, the same for the same seed.

Each file comes with whether it must not be healthy. Where a change falls on bytes that mean nothing (the date in
a zip header), "healthy" is right, and the file only has to get some verdict.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

Case = tuple[str, bytes, bool]
"""Name, contents, and whether the verdict must not be healthy."""


@dataclass(frozen=True)
class Bases:
    """One small good file of each format."""

    zip: bytes
    legacy: bytes
    safetensors: bytes
    gguf: bytes
    pickle: bytes


def bases(gguf: bytes) -> Bases:
    torch.manual_seed(0)
    state = {
        "model": {f"l{i}.weight": torch.randn(4, 4) for i in range(3)},
        "optimizer": {"param_groups": [{"lr": 1e-3}]},
    }
    buffers = io.BytesIO(), io.BytesIO()
    torch.save(state, buffers[0])
    torch.save(state, buffers[1], _use_new_zipfile_serialization=False)
    tensors = save({"a": torch.randn(4, 4), "b": torch.randn(8).bfloat16(), "c": torch.arange(4)})
    plain = pickle.dumps({"lr": 1e-3, "w": torch.randn(4, 4)}, protocol=2)
    return Bases(buffers[0].getvalue(), buffers[1].getvalue(), tensors, gguf, plain)


def corpus(seed: int, good: Bases, canary: Path) -> Iterator[Case]:
    """The whole corpus."""
    rng = random.Random(seed)
    yield from _cut(good)
    yield from _flipped(rng, good)
    yield from _lying_headers(rng, good)
    yield from _zips(good)
    yield from _hostile_pickles(canary)
    yield from _soup(rng)
    yield from _not_checkpoints(rng)


def _cut(good: Bases) -> Iterator[Case]:
    """Cut off at every structural boundary and one byte to either side, and everywhere near the ends."""
    for kind, data in (("zip.pt", good.zip), ("legacy.pt", good.legacy), ("st.safetensors", good.safetensors)):
        places = set(range(24)) | {len(data) - n for n in range(1, 60)}
        if kind == "zip.pt":
            marks = (b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\10")
            places |= {i + d for i in range(len(data)) if data[i : i + 4] in marks for d in (-1, 0, 1, 4, 30)}
        elif kind == "legacy.pt":
            places |= {i + d for i in range(len(data)) if data[i : i + 1] == b"." for d in (-1, 0, 1)}
        else:
            header = 8 + int.from_bytes(data[:8], "little")
            places |= {header + d for d in range(-9, 10)} | set(range(header, len(data), 4))
        for at in sorted(p for p in places if 0 <= p < len(data)):
            yield f"cut-{at}-{kind}", data[:at], True
    body = len(good.gguf) - 1000
    for at in [*range(0, body, max(1, body // 60))]:
        yield f"cut-{at}.gguf", good.gguf[:at], True


def _flipped(rng: random.Random, good: Bases) -> Iterator[Case]:
    """One bit changed. With checksums, a change in the pickle or in a storage must show."""
    with zipfile.ZipFile(io.BytesIO(good.zip)) as archive:
        covered = []
        for info in archive.infolist():
            n, m = struct.unpack("<HH", good.zip[info.header_offset + 26 : info.header_offset + 30])
            start = info.header_offset + 30 + n + m
            covered.append(range(start, start + info.file_size))
    for _ in range(500):
        at, bit = rng.randrange(len(good.zip)), rng.randrange(8)
        yield f"flip-{at}-{bit}.pt", _flip(good.zip, at, bit), any(at in r for r in covered)
    others = (
        ("legacy.pt", good.legacy),
        ("st.safetensors", good.safetensors),
        ("g.gguf", good.gguf),
        ("p.pkl", good.pickle),
    )
    for kind, data in others:
        for _ in range(160):
            at, bit = rng.randrange(len(data)), rng.randrange(8)
            yield f"flip-{at}-{bit}-{kind}", _flip(data, at, bit), False


def _flip(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def _safetensors(header: bytes | str, data: bytes = bytes(64), length: int | None = None) -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _lying_headers(rng: random.Random, good: Bases) -> Iterator[Case]:
    def entry(dtype: str = "F32", shape: object = (4, 4), offsets: object = (0, 64)) -> dict[str, object]:
        return {"dtype": dtype, "shape": shape, "data_offsets": offsets}

    lies = {
        "beyond": {"a": entry(offsets=(0, 128), shape=(32,))},
        "short": {"a": entry(offsets=(0, 32), shape=(8,))},
        "overlap": {"a": entry(), "b": entry(offsets=(32, 64), shape=(8,))},
        "swapped": {"a": entry(offsets=(64, 0))},
        "negative": {"a": entry(offsets=(-64, 0))},
        "dtype": {"a": entry(dtype="F33")},
        "shape": {"a": entry(shape=(5, 4))},
        "minus": {"a": entry(shape=(-4, -4))},
        "huge": {"a": entry(shape=(1 << 40, 1 << 40))},
        "float": {"a": entry(shape=(4.0, 4))},
        "nested": {"a": {"b": entry()}},
        "string": {"a": "F32"},
        "list": {"a": [1, 2]},
        "number": {"a": 1},
        "extra": {"a": entry() | {"more": 1}},
        "missing": {"a": {"dtype": "F32", "shape": [4, 4]}},
        "gap": {"a": entry(offsets=(0, 16), shape=(4,)), "b": entry(offsets=(32, 64), shape=(8,))},
        "metadata": {"__metadata__": {"a": {"b": "c"}}, "x": 1},
        "true": {"a": entry(offsets=(0, True))},
    }
    for name, header in lies.items():
        yield f"lie-{name}.safetensors", _safetensors(json.dumps(header)), True
    one = json.dumps({"a": entry()})[1:-1]
    yield "lie-twice.safetensors", _safetensors("{" + one + "," + one + "}"), True
    yield "lie-array.safetensors", _safetensors("[" + "[" * 5000 + "]" * 5000 + "]"), True
    yield "lie-deep.safetensors", _safetensors('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), True
    yield "lie-brackets.safetensors", _safetensors("{" + "[]," * 3_000_000 + "}"), True
    yield "lie-deep-metadata.safetensors", _safetensors('{"__metadata__":' + '{"a":' * 20_000 + "}" * 20_001), True
    yield "lie-name.safetensors", _safetensors('{"' + "n" * 4_000_000 + '":{}}'), True
    yield (
        "lie-text.safetensors",
        _safetensors(b'{"\xff\xfe":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]}}'),
        True,
    )
    yield (
        "lie-digits.safetensors",
        _safetensors('{"a":{"dtype":"F32","shape":[' + "9" * 900 + '],"data_offsets":[0,64]}}'),
        True,
    )
    for length in (0, 1, 2, 1 << 20, 1 << 32, 1 << 62, (1 << 64) - 1):
        yield f"lie-length-{length}.safetensors", _safetensors("{" + one + "}", length=length), True
    for i in range(300):
        head = 8 + int.from_bytes(good.safetensors[:8], "little")
        data = bytearray(good.safetensors)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(8, head)] = rng.choice(b'{}[],:"0123456789-eEaF \\\x00\xff')
        yield f"lie-random-{i}.safetensors", bytes(data), False
    for i in range(120):
        data = bytearray(good.gguf)
        data[rng.randrange(4, 300)] = rng.randrange(256)
        yield f"lie-random-{i}.gguf", bytes(data), False
    for field in (8, 16):
        for count in (1 << 20, 1 << 40, (1 << 64) - 1):
            yield (
                f"lie-{field}-{count}.gguf",
                good.gguf[:field] + struct.pack("<Q", count) + good.gguf[field + 8 :],
                True,
            )


def _zip(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return buffer.getvalue()


EMPTY = pickle.dumps({}, protocol=2)


def _storage_pickle(
    numel: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, key: str = "0"
) -> bytes:
    """A tensor as torch pickles it, with whatever numbers are wanted."""

    def number(n: int) -> bytes:
        raw = n.to_bytes(17, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw

    def numbers(ns: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, ns)) + b"t"

    text = b"X" + struct.pack("<I", len(key)) + key.encode()
    pid = b"(X\7\0\0\0storagectorch\nFloatStorage\n" + text + b"X\3\0\0\0cpu" + number(numel) + b"tQ"
    args = b"(" + pid + number(offset) + numbers(shape) + numbers(stride) + b"\x89ccollections\nOrderedDict\n)Rt"
    return b"\x80\x02}X\1\0\0\0w" + b"ctorch._utils\n_rebuild_tensor_v2\n" + args + b"Rs."


def _zips(good: Bases) -> Iterator[Case]:
    with zipfile.ZipFile(io.BytesIO(good.zip)) as archive:
        members = [(i.filename, archive.read(i)) for i in archive.infolist()]
    yield "zip-deflated.pt", _zip(members, zipfile.ZIP_DEFLATED), True
    yield "zip-lzma.pt", _zip(members, zipfile.ZIP_LZMA), True
    bomb = [("archive/data.pkl", EMPTY), ("archive/data/0", bytes(200 << 20))]
    yield "zip-bomb.pt", _zip(bomb, zipfile.ZIP_DEFLATED), True
    yield "zip-bomb-pickle.pt", _zip([("archive/data.pkl", bytes(100 << 20))], zipfile.ZIP_DEFLATED), True
    yield "zip-no-pickle.pt", _zip([("archive/data/0", bytes(64))]), True
    yield "zip-two-pickles.pt", _zip([("a/data.pkl", EMPTY), ("b/data.pkl", EMPTY)]), True
    for i, name in enumerate(("../../x", "/etc/x", "a/../../x", "a\\..\\x", "..")):
        yield f"zip-path-{i}.pt", _zip([("archive/data.pkl", EMPTY), (name, b"x")]), True
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield "zip-twice.pt", _zip([*members, members[1]]), True
    for at in range(len(good.zip)):
        if good.zip[at : at + 4] == b"PK\1\2":
            for field, form in (
                (10, "<H"),
                (8, "<H"),
                (16, "<I"),
                (20, "<I"),
                (24, "<I"),
                (42, "<I"),
                (28, "<H"),
                (46, "<H"),
            ):
                for value in (1, 8, 77, 0xFFFF):
                    patched = bytearray(good.zip)
                    old = struct.unpack_from(form, patched, at + field)[0]
                    struct.pack_into(form, patched, at + field, value)
                    harmless = old == value or field == 8
                    yield f"zip-directory-{at}-{field}-{value}.pt", bytes(patched), not harmless
    end = good.zip.rfind(b"PK\5\6")
    for field, form in ((8, "<H"), (10, "<H"), (12, "<I"), (16, "<I"), (20, "<H")):
        for value in (0, 1, 3, 0xFFFF):
            patched = bytearray(good.zip)
            struct.pack_into(form, patched, end + field, value)
            yield f"zip-end-{field}-{value}.pt", bytes(patched), False
    yield "zip-prefixed.pt", b"#!/bin/sh\n" + good.zip, True
    yield "zip-trailed.pt", good.zip + b"more", True
    yield "zip-in-zip.pt", _zip([("archive/data.pkl", good.zip)]), True
    for i, (numel, shape, stride, offset) in enumerate(
        [
            (1 << 40, (4,), (1,), 0),
            (16, (1 << 40,), (1,), 0),
            (16, (4, 4), (4, 1), 12),
            (16, (-4,), (1,), 0),
            (16, (4,), (-1,), 0),
            (16, (4,), (1 << 61,), 0),
            (-16, (4,), (1,), 0),
            (16, (4,), (1, 1), 0),
            (16, (4,), (1,), -4),
            (16, (1 << 61, 1 << 61), (1, 1), 0),
            (15, (4,), (1,), 0),
            (16, (1 << 70,), (1,), 0),
        ]
    ):
        data = _zip(
            [("archive/data.pkl", _storage_pickle(numel, shape, stride, offset)), ("archive/data/0", bytes(64))]
        )
        yield f"zip-tensor-{i}.pt", data, True
    away = _storage_pickle(16, (4,), (1,), key="../../../etc/passwd")
    yield "zip-key.pt", _zip([("archive/data.pkl", away), ("archive/data/0", bytes(64))]), True


def _hostile_pickles(canary: Path) -> Iterator[Case]:
    """Pickles that would run something, blow up or never end in a pickle machine that trusts them."""
    path = str(canary).encode()
    text = b"X" + struct.pack("<I", len(path) + 6) + b"touch " + path
    code = f"open({str(canary)!r}, 'w')".encode()
    code = b"X" + struct.pack("<I", len(code)) + code
    short = lambda s: b"\x8c" + bytes([len(s)]) + s  # noqa: E731
    attacks = {
        "system": b"\x80\x02cos\nsystem\n" + text + b"\x85R.",
        "posix": b"\x80\x02cposix\nsystem\n" + text + b"\x85R.",
        "eval": b"\x80\x02cbuiltins\neval\n" + code + b"\x85R.",
        "exec": b"\x80\x02c__builtin__\nexec\n" + code + b"\x85R.",
        "stack": b"\x80\x04" + short(b"os") + short(b"system") + b"\x93" + text + b"\x85R.",
        "newobj": b"\x80\x02csubprocess\nPopen\n" + text + b"\x85\x81.",
        "newobj-ex": b"\x80\x04csubprocess\nPopen\n" + text + b"\x85}X\5\0\0\0shell\x88s\x92.",
        "build": b"\x80\x02cos\nsystem\n)R}X\x0c\0\0\0__setstate__cos\nsystem\nsb" + text + b"b.",
        "inst": b"(" + text + b"ios\nsystem\n.",
        "obj": b"(cos\nsystem\n" + text + b"o.",
        "ext": b"\x80\x02\x82\x01" + text + b"\x85R.",
        "persid": b"\x80\x02P" + path + b"\n.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\n(cos\n__dict__\nX\6\0\0\0systemtR" + text + b"\x85R.",
        "load": b"\x80\x02ctorch.storage\n_load_from_bytes\nB" + struct.pack("<I", 4) + b"junk\x85R.",
        "nested-load": b"\x80\x02ctorch\nload\n" + text + b"\x85R.",
        "numpy": b"\x80\x02cnumpy.testing._private.utils\nrunstring\n(" + code + b"}tR.",
        "dict": b"\x80\x02}cos\nsystem\n" + text + b"\x85Rs.",
        "appends": b"\x80\x02cos\nsystem\n)R(" + text + b"e.",
    }
    for name, data in attacks.items():
        yield f"attack-{name}.pt", data, True
        yield f"attack-{name}-zip.pt", _zip([("archive/data.pkl", data), ("archive/data/0", bytes(4))]), True
        good = _storage_pickle(16, (4, 4), (4, 1))[:-1]  # beside a tensor that is perfectly fine
        hidden = good + b"X\1\0\0\0h" + data.removeprefix(b"\x80\x02").removeprefix(b"\x80\x04")[:-1] + b"s."
        numbers = struct.pack("<16f", *range(16))
        yield f"attack-{name}-hidden.pt", _zip([("archive/data.pkl", hidden), ("archive/data/0", numbers)]), True
    bombs = {
        "lists": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
        "tuples": b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
        "tuple-key": b"\x80\x02})" + b"\x85" * 500_000 + b"K\1s.",
        "dicts": b"\x80\x02" + b"}K\1" * 200_000 + b"N" + b"s" * 200_000 + b".",
        "marks": b"\x80\x02" + b"(" * 1_000_000 + b"t" * 1_000_000 + b".",
        "inert": b"\x80\x02" + b"ca\nb\n" * 200_000 + b")" + b"\x81\x85" * 200_000 + b".",
        "laughs": b"\x80\x02]q\0"
        + b"".join(b"](" + (b"h" + bytes([i])) * 10 + b"eq" + bytes([i + 1]) for i in range(200))
        + b".",
        "memo": b"\x80\x02]r\xff\xff\xff\xffj\xff\xff\xff\xff\x86.",
        "memoize": b"\x80\x04]" + b"\x94" * 1_000_000 + b".",
        "empty-lists": b"\x80\x02(" + b"]" * 2_000_000 + b"l.",
        "dups": b"\x80\x02](" + b"h\0" * 2_000_000 + b"l.",
        "dup": b"\x80\x02(]" + b"2" * 3_000_000 + b"l.",
        "floats": b"\x80\x02(" + (b"G" + bytes(8)) * 3_000_000 + b"l.",
        "long": b"\x80\x02\x8b" + struct.pack("<I", 10_000_000) + b"\x7f" * 10_000_000 + b".",
        "wide-text": b"\x80\x02X" + struct.pack("<I", 25_000_004) + b"a" * 25_000_000 + "\U0001f600".encode() + b".",
        "big-bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        "frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        "globals": b"\x80\x02(" + b"".join(b"cm%d\nn\n" % i for i in range(600_000)) + b"l.",
        "shared-name": b"\x80\x02}q\1X"
        + struct.pack("<I", 4_000_000)
        + b"k" * 4_000_000
        + b"q\0"
        + b"h\1"
        + b"h\0}s" * 0
        + b"0]s.",
        "self": b"\x80\x02]q\0h\0a.",
        "self-dict": b"\x80\x02}q\0K\1h\0s.",
    }
    for i, (name, data) in enumerate(bombs.items()):  # each takes seconds: once, bare or in an archive
        yield f"bomb-{name}.pt", data if i % 2 else _zip([("archive/data.pkl", data)]), True
    for code_ in range(256):
        yield f"opcode-{code_}.pkl", b"\x80\x02}" + bytes([code_]) + b"\1\0\0\0N.", True
    long_keys = b"\x80\x02}(" + b"".join(
        b"X" + struct.pack("<I", 200_000) + b"%06d" % i + b"k" * 199_994 + b"N" for i in range(60)
    )
    yield "bomb-names.pkl", long_keys + b"u.", True


def _soup(rng: random.Random) -> Iterator[Case]:
    """Random instructions that often almost fit together."""
    words = [
        b"]",
        b"}",
        b")",
        b"(",
        b"t",
        b"l",
        b"d",
        b"a",
        b"e",
        b"s",
        b"u",
        b"R",
        b"b",
        b"\x81",
        b"\x85",
        b"\x86",
        b"\x87",
        b"N",
        b"\x88",
        b"\x89",
        b"K\5",
        b"M\5\1",
        b"J\1\2\3\4",
        b"G" + bytes(8),
        b"X\2\0\0\0ab",
        b"C\2ab",
        b"q\1",
        b"h\1",
        b"\x94",
        b"0",
        b"1",
        b"2",
        b"Q",
        b"ccollections\nOrderedDict\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch\nFloatStorage\n",
        b"ctorch._utils\n_rebuild_parameter\n",
        b"ctorch._tensor\n_rebuild_from_type_v2\n",
        b"cnumpy.core.multiarray\n_reconstruct\n",
        b"\x8f",
        b"\x90",
        b"\x91",
        b"\x93",
        b"\x92",
        b"X\7\0\0\0storage",
        b"ctorch\nSize\n",
        b"c_codecs\nencode\n",
        b"ctorch._utils\n_rebuild_qtensor\n",
        b"cnumpy\ndtype\n",
    ]
    for i in range(700):
        body = b"".join(rng.choice(words) for _ in range(rng.randrange(1, 40)))
        yield f"soup-{i}.pkl", b"\x80\x04" + body + b".", True


def _not_checkpoints(rng: random.Random) -> Iterator[Case]:
    yield "empty.pt", b"", True
    yield "zeros.pt", bytes(5000), True
    yield "text.bin", b"just some text\n" * 50, True
    yield "page.ckpt", b"<!doctype html><p>404", True
    yield "pointer.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", True
    yield "old.tar", bytes(257) + b"ustar\x0000" + bytes(300), True
    yield "gzip.pt", b"\x1f\x8b\x08" + zlib.compress(b"x" * 100), True
    yield "array.bin", b"\x93NUMPY\1\0v\0{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }\n" + bytes(16), True
    for i in range(150):
        magic = rng.choice([b"", b"PK\3\4", b"\x80\x02", b"GGUF\3\0\0\0", b"\x10\0\0\0\0\0\0\0{"])
        yield f"noise-{i}.pt", magic + rng.randbytes(rng.randrange(1, 600)), True


def write_corpus(folder: Path, seed: int, good: Bases, canary: Path) -> dict[str, bool]:
    """Write all cases and the folders and links that are not single files; returns which must not be healthy."""
    must: dict[str, bool] = {}
    for i, (name, data, bad) in enumerate(corpus(seed, good, canary)):
        unique = f"{i:05}-{name}"
        (folder / unique).write_bytes(data)
        must[unique] = bad
    (folder / "folder.pt").mkdir()
    (folder / "loop-a.pt").symlink_to("loop-b.pt")
    (folder / "loop-b.pt").symlink_to("loop-a.pt")
    (folder / "dangling.pt").symlink_to("nowhere.pt")
    os.mkfifo(folder / "pipe.pt")
    for name in ("folder.pt", "loop-a.pt", "dangling.pt", "pipe.pt"):
        must[name] = True
    for i, target in enumerate(("../secret.safetensors", "/etc/passwd", "missing.safetensors", "a\\b.safetensors", 5)):
        sharded = folder / f"sharded-{i}"
        sharded.mkdir()
        (sharded / "model-00001-of-00001.safetensors").write_bytes(good.safetensors)
        index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": target}}
        (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
        must[sharded.name] = True
    for i, text in enumerate(
        ("{", "[]", "[" * 100_000, "{}", '{"weight_map": []}', "\ud800".encode("utf-8", "surrogatepass"))
    ):
        sharded = folder / f"index-{i}"
        sharded.mkdir()
        (sharded / "model-00001-of-00001.safetensors").write_bytes(good.safetensors)
        raw = text if isinstance(text, bytes) else text.encode()
        (sharded / "model.safetensors.index.json").write_bytes(raw)
        must[sharded.name] = True
    looped = folder / "run-loop"
    looped.mkdir()
    (looped / "again").symlink_to(".")
    (looped / "x.pt").write_bytes(b"")
    must["run-loop"] = True
    for i, data in enumerate((b"", EMPTY, b"\x80\x02}", good.zip)):
        dcp = folder / f"dcp-{i}"
        dcp.mkdir()
        (dcp / ".metadata").write_bytes(data)
        (dcp / "__0_0.distcp").write_bytes(good.zip)
        must[dcp.name] = True
    return must
