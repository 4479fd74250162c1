"""What might end the process, tried in a child process first."""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..files import file_bytes
from .collectives import has_peers

T = TypeVar("T")
_SECONDS = 120.0
_END = b"nanproof: end"
_CHECKED = tuple(f"{os.sep}{name}{os.sep}" for name in ("torch", "torchvision", "torchaudio", "functorch"))
"""Packages whose kernels check what they are given."""


def foreign_code() -> list[str]:
    """The compiled extensions of other packages that work on tensors."""
    return _foreign_code(len(sys.modules), len(torch.ops.loaded_libraries))


@functools.lru_cache(maxsize=1)
def _foreign_code(modules: int, libraries: int) -> list[str]:
    """The same as long as nothing more is loaded."""
    files = {str(getattr(m, "__file__", None)) for m in list(sys.modules.values())} | set(torch.ops.loaded_libraries)
    compiled = (f for f in files if f.endswith((".so", ".pyd", ".dylib")) and not any(part in f for part in _CHECKED))
    return sorted(f for f in compiled if _uses_torch(f))


@functools.cache
def _uses_torch(file: str) -> bool:
    with suppress(OSError):
        content = file_bytes(file)
        return b"libc10" in content or b"c10.dll" in content
    return False


def apart(work: Callable[[], T], otherwise: T, what: str, *, needs_child: bool = False) -> tuple[T, str]:
    """The result of a replay on other values than the step had; and a remark when ``what`` could not be had.

    A kernel of another package may take float64 memory for float32, or meet an index that the step never had, and read
    what is no index of anything. Where such code is loaded, the replay runs in a child process, whose end is not that
    of the training. Where there can be no child, it runs here, unless it ``needs_child``.
    """
    code = foreign_code()
    if not code:
        return work(), ""
    name = Path(code[0]).name
    accelerated = torch.cuda.is_initialized() or torch.backends.mps.is_available()  # type: ignore[no-untyped-call]
    if not hasattr(os, "fork") or has_peers() or accelerated:
        return (otherwise, f"not {what}: the kernels of {name} may not survive it") if needs_child else (work(), "")
    said = _in_child(work)
    if said is None:
        return otherwise, f"not {what}: it did not end within {_SECONDS:.0f} seconds in a child process"
    if not said:
        return otherwise, f"not {what}: the kernels of {name} do not survive it"
    result, error = pickle.loads(said)  # of our own child
    if error is not None:
        raise error
    return result, ""


def _in_child(work: Callable[[], Any]) -> bytes | None:
    """What a child says of some work; nothing when it dies of it, None when it does not come to an end.

    A child has only the thread that made it, and locks that other threads held stay held in it: it may wait forever.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()  # the trace of a crash would look like one of the training
            torch.set_num_threads(1)  # the threads of the parent do not live here
            left = memoryview(_outcome(work) + _END)
            while left:
                left = left[os.write(writer, left) :]
        finally:
            os._exit(0)
    os.close(writer)
    said, until = b"", time.monotonic() + _SECONDS
    try:
        # not up to the end of the pipe: a data loader's worker that was started meanwhile holds it open
        while not said.endswith(_END):
            if not select.select([reader], [], [], max(until - time.monotonic(), 0.0))[0]:
                return None
            part = os.read(reader, 1 << 16)
            if not part:
                return b""
            said += part
        return said.removesuffix(_END)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _outcome(work: Callable[[], Any]) -> bytes:
    """What a child tells: the result, or the error that it met."""
    try:
        return pickle.dumps((work(), None))
    except BaseException as error:
        try:
            return pickle.dumps((None, error))
        except Exception:
            return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
