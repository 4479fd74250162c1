"""Changed copies of given inputs, at full speed: the second half of a campaign, without a look at what they reach."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fuzz.seeds import DICTIONARY

WAIT = 300  # seconds of the clock for one input, for one that waits for something and takes no CPU time
SLOW = 25  # CPU seconds for one input: on a busy machine a child may wait as long for its turn
WORDS = [word.encode().decode("unicode-escape").encode("latin-1") for word in DICTIONARY]


def mutated(given: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Without end: bytes changed, cut, doubled, spliced from another input, or words put in."""
    while True:
        data = bytearray(rng.choice(given))
        for _ in range(1 + int(rng.expovariate(0.7))):
            at, size = rng.randrange(len(data) + 1), int(rng.expovariate(0.2))
            match rng.randrange(7):
                case 0 if at < len(data):
                    data[at] = rng.randrange(256)
                case 1 if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
                case 2:
                    del data[at : at + size]
                case 3:
                    data[at:at] = data[at : at + size]
                case 4:
                    data[at:at] = rng.choice(WORDS)
                case 5:
                    other = rng.choice(given)
                    start = rng.randrange(len(other) + 1)
                    data[at : at + size] = other[start : start + size + 8]
                case _:
                    data[at:at] = rng.randbytes(1 + size % 4)
        yield bytes(data[:4096])


class TooSlow(BaseException):
    """One input takes longer than any honest file of its size; not an Exception, so that nothing passes over it."""


class UnderWay:
    """The input that a target has now, where it can be read after the process was killed."""

    def __init__(self, folder: Path) -> None:
        with (folder / "input").open("w+b") as file:
            file.truncate(5000)
            self._memory = mmap.mmap(file.fileno(), 5000)

    def write(self, count: int, data: bytes) -> None:
        self._memory[: 12 + len(data)] = struct.pack("<QL", count, len(data)) + data

    @staticmethod
    def read(folder: Path) -> tuple[int, bytes]:
        """How many inputs there were, and the last; none if the process did not come to its first."""
        path = folder / "input"
        held = path.read_bytes() if path.exists() else bytes(12)
        count, size = struct.unpack_from("<QL", held)
        return count, held[12 : 12 + size]


def main(target: str, corpus: Path, most: int | None, until: float, seed: int, out: Path) -> None:
    """Throw ``most`` inputs at a target, or until the clock says ``until``; the first that breaks it is printed."""
    from fuzz import targets

    targets.FOLDER = out
    function = targets.TARGETS[target]
    targets.warm_up(target, corpus)
    given = [p.read_bytes() for p in corpus.iterdir()] or [b""]

    def watch(event: str, args: tuple[object, ...]) -> None:
        if targets.is_violation(event, args):
            print(
                json.dumps({"inputs": count, "executed": f"{event} {str(args)[:200]}", "data": data.hex()}), flush=True
            )
            os._exit(1)

    def late(*_: object) -> None:
        raise TooSlow

    count, data = 0, b""
    under_way = UnderWay(out)
    signal.signal(signal.SIGPROF, late)
    signal.signal(signal.SIGALRM, late)
    sys.addaudithook(watch)
    for data in mutated(given, random.Random(seed)):
        count += 1
        under_way.write(count, data)
        signal.setitimer(signal.ITIMER_PROF, SLOW)
        signal.setitimer(signal.ITIMER_REAL, WAIT)
        try:
            function(data)
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
            kind = "false" if isinstance(error, targets.Wrong) else "crashed"
            print(json.dumps({"inputs": count, kind: words[:300], "data": data.hex()}), flush=True)
            raise
        if count == most or (not count % 16 and time.monotonic() > until):
            break
    print(json.dumps({"inputs": count}), flush=True)
