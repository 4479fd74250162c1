"""``scan --policy weights-only`` beside torch: real checkpoints with changed pickles, given to both.

cd tests && python -m checkpoint.differential --count 10000 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import io
import pickletools
import random
import resource
import signal
import threading
import warnings
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from fuzz.mutate import mutated
from nanproof.checkpoint.flaws import Flaw
from nanproof.checkpoint.source import Memory
from nanproof.checkpoint.weights_only import UNSURE, reasons

Files = dict[str, bytes]


class Tally(NamedTuple):
    """How often torch accepted, refused, and where scan said something else or that it does not know."""

    accepted: int
    refused: int
    unsure: list[str]
    wrong: list[tuple[str, bytes, list[str], str]]
    """The name of the original, the file, what scan said, what torch said."""


def originals() -> Files:
    """Checkpoints as libraries write them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    weight = torch.arange(12.0).reshape(3, 4)
    tagged = nn.Parameter(weight.clone())
    tagged.note = "kept"  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = {
            "state": model.state_dict(),
            "training": {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "step": 3,
                "lr": 1e-4,
                "rng": torch.get_rng_state(),
                "done": False,
                "name": "run",
            },
            "views": {
                "t": weight.t(),
                "row": weight[1],
                "step": weight[:, ::2],
                "none": torch.empty(0),
                "one": weight[0, 0],
            },
            "dtypes": {
                str(t): torch.ones(3).to(t)
                for t in (
                    torch.bfloat16,
                    torch.float16,
                    torch.float64,
                    torch.int8,
                    torch.bool,
                    torch.complex64,
                    torch.uint16,
                    torch.float8_e4m3fn,
                )
            },
            "parameters": [nn.Parameter(weight), tagged, weight.clone().requires_grad_()],
            "plain": {
                "set": {1, 2},
                "bytes": b"ab",
                "array": bytearray(b"cd"),
                "complex": 1 + 2j,
                "big": 1 << 70,
                "counter": collections.Counter("aab"),
                "ordered": collections.OrderedDict(a=1),
                "size": torch.Size([2]),
                "device": torch.device("cpu"),
                "dtype": torch.float32,
                "nested": [(1, (2.5, None)), {"a": {"b": []}}],
            },
            "sparse": {"coo": weight.to_sparse(), "csr": weight.to_sparse_csr()},
            "quantized": torch.quantize_per_tensor(weight, 0.1, 2, torch.qint8),
            "meta": {"m": torch.empty(2, 3, device="meta"), "w": weight},
            "conjugate": torch.view_as_complex(torch.ones(2, 2)).conj(),
        }
    found = {}
    for name, value in values.items():
        for modern in (True, False):
            buffer = io.BytesIO()
            torch.save(value, buffer, _use_new_zipfile_serialization=modern)
            found[f"{name}-{'zip' if modern else 'legacy'}"] = buffer.getvalue()
    return found


def changed(files: Files, seed: int) -> Iterator[tuple[str, bytes]]:
    """Without end: one of the files with a changed pickle; the archive around it is sound."""
    rng = random.Random(seed)
    pickles = {name: _pickle(data) for name, data in files.items()}
    by_bytes = {name: mutated([one], rng) for name, one in pickles.items()}
    splices = mutated(list(pickles.values()), rng)
    parts = {name: _instructions(data) for name, data in pickles.items()}
    others = [part for one in parts.values() for part in one]
    while True:
        name, dice = rng.choice(list(files)), rng.random()
        if dice < 0.6:
            data = b"".join(_changed_instructions(parts[name], others, rng))
        else:
            data = next(by_bytes[name] if dice < 0.95 else splices)
        yield name, _with_pickle(files[name], pickles[name], data)


def _instructions(data: bytes) -> list[bytes]:
    """One instruction of the pickles each; what stands behind them is the last."""
    starts, at = [], 0
    while at < len(data) and data[at] == 0x80:
        places = [place for _, _, place in pickletools.genops(data[at:])]
        starts += [at + place for place in places]
        at += places[-1] + 1
    return [data[a:b] for a, b in pairwise([*starts, at, len(data)])]


def _changed_instructions(parts: list[bytes], others: list[bytes], rng: random.Random) -> list[bytes]:
    """Left out, doubled, exchanged, or taken from another pickle: it stays a row of instructions."""
    found = list(parts)
    for _ in range(1 + int(rng.expovariate(1.0))):
        a, b = rng.randrange(len(found)), rng.randrange(len(found))
        match rng.randrange(5):
            case 0:
                del found[a]
            case 1:
                found.insert(a, found[b])
            case 2:
                found[a], found[b] = found[b], found[a]
            case 3:
                found.insert(a, rng.choice(others))
            case _:
                alike = [o for o in others if o and found[a][:1] in _ALIKE and o[:1] in _ALIKE]
                found[a] = rng.choice(alike or others)
        if not found:
            break
    return found


_ALIKE = [bytes([code]) for code in b"JKMGXNU\x88\x89)]}\x8fhjc\x8a"]
"""Instructions that push a value: one in the place of another keeps the stack in order."""


def _pickle(data: bytes) -> bytes:
    if data[:2] != b"PK":
        return data[:4000]  # the pickles of a legacy file stand in front of its storages
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


def _with_pickle(file: bytes, old: bytes, new: bytes) -> bytes:
    if file[:2] != b"PK":
        return new + file[len(old) :]
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as archive, zipfile.ZipFile(out, "w") as copy:
        for name in archive.namelist():
            copy.writestr(name, new if name == "archive/data.pkl" else archive.read(name))
    return out.getvalue()


def compare(count: int, seed: int) -> Tally:
    """Give both ``count`` files."""
    accepted, refused, unsure, wrong = 0, 0, [], []
    files = originals()
    stream = changed(files, seed)
    for i in range(count + len(files)):
        name, data = list(files.items())[i] if i < len(files) else next(stream)
        try:
            against = reasons(Memory(data))
        except Flaw as flaw:  # a zip that is damaged
            against = [flaw.why]
        said = _torch_says(data)
        accepted, refused = accepted + (not said), refused + bool(said)
        if against and against[0].endswith(UNSURE):
            unsure.append(against[0])
        elif bool(against) != bool(said):
            wrong.append((name, data, against, said))
    return Tally(accepted, refused, unsure, wrong)


def _torch_says(data: bytes) -> str:
    """Why torch refuses it; empty if it loads."""
    said = []

    def load() -> None:
        try:
            torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    signal.alarm(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch judges the sparse tensors of a load that failed in the next one: in that thread, 2.7 in any
        getattr(torch._utils, "_sparse_tensors_to_validate", []).clear()
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    signal.alarm(0)
    return "".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    found = compare(options.count, options.seed)
    for name, data, against, said in found.wrong[:20]:
        print(f"{name}: scan {against}, torch {said[:200]!r}\n{_pickle(data).hex()[:400]}")
    for words, number in collections.Counter(found.unsure).most_common(10):
        print(f"{number:,} unsure: {words}")
    refused = sum(bool(against) for _, _, against, _ in found.wrong)
    print(
        f"{options.count:,} changed files: torch accepts {found.accepted:,}, refuses {found.refused:,}; "
        f"scan accepts {len(found.wrong) - refused:,} that torch refuses, refuses {refused:,} that it accepts, "
        f"and is unsure of {len(found.unsure):,}"
    )


if __name__ == "__main__":
    main()
