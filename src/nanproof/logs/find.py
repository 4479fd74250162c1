"""The logs below a folder, known by what is in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import FormatError
from ..files import open_file
from .collect import Collector
from .detect import HEAD, find_stream, is_gzip, unzip_head
from .readers.database import is_database
from .readers.mlflow import is_run_folder
from .readers.notebook import LARGEST
from .series import Series
from .sources import RUN_LOG, event_files, head_of, open_source

FILES, TEXTS = 50_000, 3_000
"""How many files are looked at, and of how many the text is read: a folder may be a whole disk."""
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "venv", "env", "dist-packages"})
# What holds samples of logs or numbers without being a log, and what is large and certainly none.
_OTHER = frozenset(
    {
        ".py",
        ".pyi",
        ".pyc",
        ".md",
        ".rst",
        ".yaml",
        ".yml",
        ".toml",
        ".html",
        ".htm",
        ".js",
        ".ts",
        ".css",
        ".c",
        ".cc",
        ".cpp",
        ".h",
        ".hpp",
        ".cu",
        ".sh",
        ".rs",
        ".go",
        ".java",
        ".tex",
        ".cfg",
        ".ini",
        ".lock",
        ".xml",
        ".svg",
        ".png",
        ".jpg",
        ".jpeg",
        ".gif",
        ".webp",
        ".pdf",
        ".pt",
        ".pth",
        ".bin",
        ".ckpt",
        ".safetensors",
        ".gguf",
        ".pkl",
        ".npy",
        ".npz",
        ".parquet",
        ".arrow",
        ".h5",
        ".hdf5",
        ".tar",
        ".zip",
        ".whl",
        ".so",
        ".a",
        ".o",
        ".mp4",
        ".wav",
        ".flac",
        ".onnx",
        ".distcp",
        ".model",
        ".vocab",
        ".patch",
        ".diff",
    }
)
_TELLING = frozenset({"loss", "component", "grad_norm", "eval", "loss_scale"})
_HINTS = (
    b"loss",
    b"grad_norm",
    b"grad norm",
    b"gnorm",
    b"nll",
    b"kld",
    b"bce",
    b"mse",
    b"l_pix",
    b"overflow",
    b"nan",
    b"traceback",
    b"error",
    b"mae",
    b"reward",
    b"checksum",
    b"trl:",
    b"tel:",
    b"exception",
    b"runtimewarning",
    b"p\xc3\xa9rdida",
    b"perda",
    b"perte",
    b"verlust",
    b"\xe6\x90\x8d\xe5\xa4\xb1",
    b"\xec\x86\x90\xec\x8b\xa4",
    b"\xd0\xbf\xd0\xbe\xd1\x82\xd0\xb5\xd1\x80",
    b"\xe6\x8d\x9f\xe5\xa4\xb1",
)
"""In a log of training there is one of these; looking for them is much quicker than reading."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """A log that was found; `nanproof.logs.read` takes its path, and its run where it has one."""

    path: str
    format: str
    bytes: int
    modified: float
    """When it was last written, in seconds since 1970."""
    run: str = ""


def find_logs(folder: str | os.PathLike[str]) -> tuple[LogFile, ...]:
    """The logs below a folder, the newest first; a single file is looked at as well."""
    root = Path(folder)
    found = list(_look_at_file(root)) if root.is_file() else list(_walk(root))
    return tuple(sorted(_newest_states(found), key=lambda log: (-log.modified, log.path, log.run)))


def _walk(root: Path) -> Iterator[LogFile]:
    seen = texts = 0
    for place, folders, files in os.walk(root):
        here = Path(place)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in _SKIPPED)
        if (here / RUN_LOG).is_file():
            yield _log(here / RUN_LOG, "nanproof", here)
            folders[:] = [f for f in folders if f != "incidents"]
        if is_run_folder(here):
            yield _log(here / "metrics", "mlflow", here)
            folders.clear()
            continue
        events = set(event_files(here)) if files else set()
        if events:
            yield _log(max(events, key=lambda p: p.stat().st_mtime), "tensorboard", here)
        for name in sorted(files):
            path = here / name
            seen += 1
            if seen > FILES:
                return
            if path in events or name == RUN_LOG or path.suffix.lower() in _OTHER or name.startswith("."):
                continue
            texts += 1
            if texts <= TEXTS and not path.is_symlink():  # what a link leads to is found where it is
                with suppress(OSError):  # gone meanwhile
                    yield from _look_at_file(path)


def _look_at_file(path: Path) -> Iterator[LogFile]:
    head = head_of(path)
    if not head or not path.is_file():
        return
    if is_database(head):
        yield from _runs(path)
        return
    zipped = is_gzip(head)
    name, stream = find_stream(unzip_head(head) if zipped else head)
    form = f"{name}, gzip" if zipped else name
    if name in ("tensorboard", "wandb", "trainer state"):
        yield _log(path, form, path)
    elif name != "binary" and not (path.suffix == ".json" and name == "text"):
        collector = Collector(source=str(path), format=name)
        decoder = stream(collector)
        for part in [unzip_head(head)] if zipped else _parts(path, name, head):
            if name in ("csv", "notebook") or any(word in part.lower() for word in _HINTS):
                decoder.feed(part)
        decoder.close()
        if _tells(collector.series()):
            yield _log(path, form, path)


def _parts(path: Path, name: str, head: bytes) -> list[bytes]:
    """The lines at the beginning and at the end of a file; a notebook or a history can only be read as a whole."""
    if name in ("notebook", "history"):
        return [head_of(path, LARGEST)]
    return [head] if len(head) < HEAD else [head[: head.rfind(b"\n") + 1], _end_of(path)]


def _tells(series: Series) -> bool:
    """Whether this is the log of a training: it has a loss or a norm, or it says that one of them is bad."""
    if any(c.role in _TELLING for c in series.columns.values()):
        return True
    kinds, names = ("nan", "exception", "overflow", "hardware"), ("labels-masked", "invalid-value")
    return any(e.kind in kinds or e.name in names for e in series.events)


def _runs(path: Path) -> Iterator[LogFile]:
    collector = Collector(source=str(path), format="")
    try:
        source = open_source(path, collector, None)
        if source is not None:
            source.poll()
    except FormatError:
        return
    for run in collector.runs:
        yield _log(path, collector.format, path, run)


def _end_of(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            file.seek(max(HEAD, file.seek(0, os.SEEK_END) - HEAD))
            return file.read(HEAD).partition(b"\n")[2]
    except OSError:
        return b""


def _log(file: Path, form: str, path: Path, run: str = "") -> LogFile:
    status = file.stat()
    return LogFile(path=str(path), format=form, bytes=status.st_size, modified=status.st_mtime, run=run)


def _newest_states(found: Iterable[LogFile]) -> Iterator[LogFile]:
    """Every checkpoint of the HF Trainer holds the whole history: of siblings only the last is a log."""
    newest: dict[str, tuple[int, LogFile]] = {}
    for log in found:
        folder = Path(log.path).parent
        number = _CHECKPOINT.search(folder.name)
        if log.format != "trainer state" or number is None:
            yield log
            continue
        here, count = str(folder.parent), int(number[1])
        if here not in newest or count > newest[here][0]:
            newest[here] = (count, log)
    yield from (log for _, log in newest.values())
