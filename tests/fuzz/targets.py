"""What the fuzzer throws bytes at: each target reads them and raises when something is wrong with the reader.

A target may end in a `Flaw` or a `NanproofError`: that is a verdict. Everything else is a finding, and so is a pickle
whose calls Python's own machine knows and ours does not.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanproof.checkpoint.calls import Calls
from nanproof.checkpoint.dcp import read_index
from nanproof.checkpoint.flaws import Flaw
from nanproof.checkpoint.formats import read_file
from nanproof.checkpoint.hidden import search
from nanproof.checkpoint.machine import load_whole
from nanproof.checkpoint.names import ORDINARY
from nanproof.checkpoint.source import Memory
from nanproof.checkpoint.sweep import sweep_file
from nanproof.errors import NanproofError

FOLDER = Path(tempfile.gettempdir())
FORBIDDEN = frozenset(
    {
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "os.forkpty",
        "pty.spawn",
        "subprocess.Popen",
        "pickle.find_class",
        "socket.connect",
        "socket.bind",
        "ctypes.dlopen",
        "shutil.rmtree",
        "os.remove",
        "os.rename",
        "webbrowser.open",
        "urllib.Request",
    }
)
"""What no reader does: each is an event of Python's audit hooks."""


def is_violation(event: str, args: tuple[Any, ...]) -> bool:
    """Whether an audit event is one that a reader must not cause: to execute, to connect, or to write elsewhere."""
    if event != "open":
        return event in FORBIDDEN
    path, _, flags = args
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return bool(writes) and isinstance(path, str) and not path.startswith((str(FOLDER), "/dev/null"))


class Wrong(AssertionError):
    """A reader said something that is not so."""


class Stub:
    """Stands for a class or function of a pickle in Python's machine; remembers what is called."""

    def __init__(self, name: str, called: list[str]) -> None:
        self.__dict__["_name"], self.__dict__["_called"] = name, called
        self.__dict__["__new__"] = self._new

    def __call__(self, *args: Any, **words: Any) -> Any:
        self._called.append(self._name)
        return Stub(f"{self._name}()", self._called)

    def _new(self, _: Any, *args: Any, **words: Any) -> Any:
        return self(*args, **words)


class Traced(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """Python's own machine, with stubs for all names."""

    def __init__(self, data: bytes, called: list[str]) -> None:
        super().__init__(io.BytesIO(data))
        self.called = called

    def find_class(self, module: str, name: str) -> Any:
        return Stub(f"{module}.{name}", self.called)

    def get_extension(self, code: int) -> None:
        if code <= 0:  # as Python does
            raise pickle.UnpicklingError
        self.append(Stub(f"copyreg extension.{code}", self.called))

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError


def fuzz_pickle(data: bytes) -> None:
    """The machine for pickles, compared with Python's: what that one calls must be on our list."""
    seen = Calls()
    whole = True
    try:
        load_whole(data, seen=seen)
    except Flaw:
        whole = False
        search(data, seen)
    seen.reasons()
    seen.notes()
    called: list[str] = []
    if b"\x96" not in data:  # Python takes as much memory as it is told to for these
        try:
            Traced(data, called).load()
        except MemoryError:
            return
        except Exception:
            pass
    if not whole or len(seen.called) >= 50:
        return
    odd = {c for c in called if not c.endswith("()") and c not in ORDINARY and len(c) < 100 and c.isprintable()}
    if odd - set(seen.called) - seen.named:
        raise Wrong(f"Python calls {sorted(odd)[:3]}, which is not reported")
    if odd - set(seen.called):
        raise Wrong(f"Python calls {sorted(odd - set(seen.called))[:3]}, which is reported as a mention")


def _checkpoint(data: bytes, name: str) -> bool:
    """Read and test it; whether all of it was read and every number is finite."""
    source = Memory(data, name)
    seen = Calls()
    try:
        contents = read_file(source, seen=seen)
        sweeps, failed = sweep_file(source, contents, jobs=1)
    except Flaw:
        search(data[:4096], seen)
        return False
    good = all(s is None or not s.bad for s in sweeps)
    return good and not failed and not contents.unread and not seen.reasons()


def _all_finite(data: bytes) -> None:
    """What was called finite here must be finite where torch itself loads it."""
    import torch

    try:
        loaded = torch.load(io.BytesIO(data), weights_only=True)
    except Exception:  # torch reads less than we do; what it refuses needs no comparison
        return
    for tensor in _tensors(loaded):
        if tensor.is_floating_point() and tensor.layout == torch.strided and not bool(tensor.isfinite().all()):
            raise Wrong(f"called finite, and torch loads {tensor.flatten()[:4].tolist()}")


def _tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    if hasattr(value, "is_floating_point"):
        yield value
    elif isinstance(value, dict | list | tuple | set) and depth < 20:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner, depth + 1)


def fuzz_zip(data: bytes) -> None:
    whole = data if data[:4] == b"PK\3\4" else b"PK\3\4" + data
    if _checkpoint(whole, "a.pt"):
        _all_finite(whole)


NUMBERS = b"".join(n.to_bytes(2, "little") for n in (0x3F80, 0x3F80, 0x3F80, 0x7FC0, 0x3F80, 0xFF80, 0, 0x3F80))
"""In bfloat16 and float32 some are finite, some NaN and infinite, so that it matters which ones a tensor holds."""


def fuzz_weights(data: bytes) -> None:
    """The pickle of a torch zip, in an archive without a flaw, beside one good storage and one with NaN."""
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in (("data.pkl", data), ("data/0", bytes(16)), ("data/1", NUMBERS), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", content)
    if _checkpoint(buffer.getvalue(), "a.pt"):
        _all_finite(buffer.getvalue())


def fuzz_safetensors(data: bytes) -> None:
    """A header of any kind in front of some numbers; what the real library accepts and refuses is compared."""
    import torch
    from safetensors import SafetensorError, deserialize

    _checkpoint(data, "a.safetensors")
    framed = len(data).to_bytes(8, "little") + data + bytes(48) + NUMBERS
    source = Memory(framed, "a.safetensors")
    try:
        read_file(source)
    except Flaw:
        return
    try:
        tensors = deserialize(framed)
    except SafetensorError as error:
        raise Wrong(f"read here, refused by safetensors: {error}") from None
    if _checkpoint(framed, "a.safetensors"):
        kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
        for name, facts in tensors:
            if facts["dtype"] in kinds and facts["data"]:
                values = torch.frombuffer(bytearray(facts["data"]), dtype=kinds[facts["dtype"]])
                if not bool(values.isfinite().all()):
                    raise Wrong(f"{name} is called finite, and holds {values[:4].tolist()}")


def fuzz_gguf(data: bytes) -> None:
    _checkpoint(b"GGUF" + data, "a.gguf")


def fuzz_legacy(data: bytes) -> None:
    if _checkpoint(data, "a.pt"):
        _all_finite(data)


def fuzz_dcp(data: bytes) -> None:
    with suppress(Flaw):
        read_index(Memory(data, ".metadata"), Calls())


def _file(data: bytes, name: str) -> Path:
    path = FOLDER / name
    path.write_bytes(data)
    return path


def fuzz_log(data: bytes) -> None:
    from nanproof.logs import read
    from nanproof.logs.timeline import timeline

    kind = ("log", "jsonl", "csv", "json", "txt")[data[0] % 5] if data else "log"
    try:
        series = read(_file(data[1:], f"nanproof-fuzz.{kind}"))
        json.dumps([m.text for m in timeline(series).moments])
    except NanproofError:
        return
    if (
        kind == "jsonl"
        and not series.notes  # a file that is taken for binary data says so
        and _has_nan(data[1:])
        and not any(math.isnan(v) for c in series.columns.values() for v in c.values)
    ):
        raise Wrong("the log holds a loss of NaN, and the columns do not")


def _has_nan(data: bytes) -> bool:
    """Whether any line is a plain record of a step whose loss is NaN; a carriage return ends a line too."""
    found = False
    for line in data.replace(b"\r", b"\n").split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and set(record) == {"step", "loss"} and type(record["step"]) is int:
            loss = record["loss"]
            found = found or (isinstance(loss, float) and math.isnan(loss) and 0 <= record["step"] < 10**9)
    return found


def fuzz_events(data: bytes) -> None:
    from nanproof.logs import read
    from nanproof.logs.readers.tensorboard import _masked_crc

    length = len(data).to_bytes(8, "little")
    sums = [_masked_crc(part).to_bytes(4, "little") for part in (length, data)]
    framed = length + sums[0] + data + sums[1]  # as it stands its checksum would end the reading at once
    for content in (data, framed + framed):
        with suppress(NanproofError):
            read(_file(content, "events.out.tfevents.1.fuzz"))


def fuzz_wandb(data: bytes) -> None:
    import zlib

    from nanproof.logs import read

    part = data[:30_000]
    framed = zlib.crc32(part, zlib.crc32(b"\1")).to_bytes(4, "little") + len(part).to_bytes(2, "little") + b"\1" + part
    for content in (data, framed):
        with suppress(NanproofError):
            read(_file(b":W&B\xee\xbe\x00" + content, "run-fuzz.wandb"))


def fuzz_config(data: bytes) -> None:
    from nanproof.config import check_config, load

    kind = ("yaml", "toml", "json")[data[0] % 3] if data else "yaml"
    path = _file(data[1:], f"nanproof-fuzz.{kind}")
    try:
        list(load(path))
        check_config([path])
    except NanproofError:
        pass


def fuzz_hydra(data: bytes) -> None:
    """Two configs and an override, parted by 0xFF: the first includes the second through its defaults list."""
    from nanproof.config import load

    first, second, word = [*data.split(b"\xff"), b"", b""][:3]
    folder = FOLDER / "nanproof-fuzz-conf"
    (folder / "group").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_bytes(b"defaults:\n  - group: a\n  - _self_\n" + first)
    (folder / "group" / "a.yaml").write_bytes(second)
    try:
        words = [word.decode("utf-8", "replace")] if word else []
        list(load(folder, name="config", overrides=words))
    except NanproofError:
        pass


def fuzz_override(data: bytes) -> None:
    from nanproof.config.overrides import parse_override

    with suppress(NanproofError):
        parse_override(data.decode("utf-8", "replace"))


def fuzz_lint(data: bytes) -> None:
    from nanproof.linting import lint

    codes = {f.code for f in lint(_file(b"import torch\n" + data, "nanproof_fuzz.py"))}
    if "NP002" in codes:
        raise Wrong("a rule failed")


def warm_up(target: str, corpus: Path) -> None:
    """Import what is imported when it is first needed: a campaign ends at any library that is loaded later."""
    for path in corpus.iterdir():
        TARGETS[target](path.read_bytes())
    if target in ("zip", "weights", "legacy"):
        import torch

        buffer = io.BytesIO()
        torch.save({"w": torch.ones(2)}, buffer)
        _all_finite(buffer.getvalue())


TARGETS: dict[str, Callable[[bytes], None]] = {
    name.removeprefix("fuzz_"): function for name, function in globals().items() if name.startswith("fuzz_")
}
