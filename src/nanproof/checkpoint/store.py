"""Where checkpoints lie: folders of this machine, or an fsspec filesystem behind a URL."""

from __future__ import annotations

import glob
import os
import re
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from ..errors import UsageError
from .flaws import damaged, refused, unreadable
from .source import LocalFile, RemoteFile, Source, network_words, read, reason

MAX_JSON = 16 << 20


class Item(NamedTuple):
    """An entry of a folder."""

    name: str
    path: str
    folder: bool
    size: int = 0


class Store(Protocol):
    """Listing and opening; paths are strings with ``/``."""

    def kind(self, path: str) -> str | None:
        """Either "file" or "folder", or None when there is nothing."""

    def list(self, path: str) -> list[Item]: ...

    def open(self, path: str) -> Source: ...


class Local:
    """This machine's files."""

    def kind(self, path: str) -> str | None:
        if os.path.isdir(path):  # noqa: PTH112 - pathlib would be loaded for this alone
            return "folder"
        return "file" if os.path.lexists(path) else None  # a dangling or looping link gets a verdict, not an error

    def list(self, path: str) -> list[Item]:
        items = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    items.append(_item(entry))
        except OSError as error:
            raise unreadable(f"cannot be listed: {reason(error)}") from None
        return sorted(items, key=lambda i: i.name)

    def open(self, path: str) -> Source:
        return LocalFile(path)


def _item(entry: os.DirEntry[str]) -> Item:
    try:
        # a link to a folder is not followed: it would be scanned twice, or for ever
        folder = entry.is_dir(follow_symlinks=False)
        size = 0 if folder else entry.stat().st_size
    except OSError:
        folder, size = False, 0
    return Item(name=entry.name, path=entry.path, folder=folder, size=size)


class Remote:
    """What fsspec reaches: ``s3://…``, ``gs://…``, ``memory://…``."""

    def __init__(self, url: str) -> None:
        self._sizes: dict[str, int] = {}  # as they were listed: to ask again would cost a round trip for each file
        self._listed: dict[str, list[Item]] = {}
        self._web = url.startswith("http")
        try:
            import fsspec
        except ImportError:
            raise UsageError(f"{url} needs fsspec", hint="pip install 'nanproof[remote]'") from None
        try:
            self.filesystem, self.root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            library = url.partition("://")[0].replace("s3", "s3fs").replace("gs", "gcsfs").replace("az", "adlfs")
            raise UsageError(f"{url} cannot be reached: {error}", hint=f"pip install {library}") from None
        except ValueError as error:
            raise UsageError(f"{url} cannot be reached: {error}", hint="check the scheme of the address") from None

    def kind(self, path: str) -> str | None:
        if path in self._sizes:
            return "file"
        try:
            with suppress(FileNotFoundError):
                # a name without a suffix is mostly a folder's, and its list is needed next; a web page has none
                if (
                    not self._web
                    and "." not in path.rpartition("/")[2]
                    and any(i.path != path for i in self._ask(path))
                ):
                    return "folder"
                found = self.filesystem.info(path)
                if found["type"] == "file":
                    self._sizes[path] = int(found["size"])
                    return "file"
            return "folder" if self.filesystem.isdir(path) else None
        except Exception as error:  # every store has errors of its own
            raise self._lost(path, error) from None

    def glob(self, pattern: str) -> list[str]:
        try:
            return sorted(str(p) for p in self.filesystem.glob(pattern))
        except Exception as error:
            raise self._lost(pattern, error) from None

    def _lost(self, path: str, error: Exception) -> UsageError:
        hint = "check the address, the endpoint and the credentials, then run it again"
        return UsageError(f"{path} cannot be reached: {network_words(error)}", hint=hint)

    def _ask(self, path: str) -> list[Item]:
        if path not in self._listed:
            items = [
                Item(
                    name=str(e["name"]).rstrip("/").rpartition("/")[2],
                    path=str(e["name"]),
                    folder=e["type"] == "directory",
                    size=int(e.get("size") or 0),
                )
                for e in self.filesystem.ls(path, detail=True)
            ]
            self._sizes |= {i.path: i.size for i in items if not i.folder}
            self._listed[path] = sorted(items, key=lambda i: i.name)
        return self._listed[path]

    def list(self, path: str) -> list[Item]:
        try:
            return self._ask(path)
        except Exception as error:  # every store has errors of its own
            raise unreadable(f"cannot be listed: {network_words(error)}") from None

    def open(self, path: str) -> Source:
        try:
            size = self._sizes[path] if path in self._sizes else int(self.filesystem.size(path))
        except Exception as error:
            raise unreadable(f"cannot be opened: {network_words(error)}") from None
        return RemoteFile(self.filesystem, path, size)


def resolve(path: str | os.PathLike[str]) -> list[tuple[Store, str]]:
    """The places that an argument means: a path, a glob or a URL; one that is nothing is a usage error."""
    text = os.fspath(path)
    if "://" in text:
        remote = Remote(text)
        paths = remote.glob(remote.root) if glob.has_magic(remote.root) else [remote.root]
        found: list[tuple[Store, str]] = [(remote, str(p)) for p in paths if remote.kind(str(p))]
    else:
        local = Local()
        paths = [text] if local.kind(text) or not glob.has_magic(text) else sorted(glob.glob(text, recursive=True))  # noqa: PTH207
        found = [(local, p) for p in paths if local.kind(p)]
    if not found:
        hint = "give a checkpoint, a folder of checkpoints, or a glob in quotes"
        raise UsageError(f"there is nothing at {text}", hint=hint)
    return found


def read_json(store: Store, path: str) -> Any:
    """A small JSON file; every way it can be wrong is a `Flaw`."""
    import json

    source = store.open(path)
    try:
        if source.size > MAX_JSON:
            raise refused(f"has {source.size >> 20} MB; more than {MAX_JSON >> 20} MB of JSON are not read")
        data = read(source, 0, source.size)
        if data.count(b"[") + data.count(b"{") > 200_000:  # brackets become objects, and objects are large
            raise refused("nests more lists and objects than any real file")
        return json.loads(data)
    except (ValueError, RecursionError):
        raise damaged("is not JSON") from None
    finally:
        source.close()


def read_head(store: Store, path: str, keys: tuple[str, ...]) -> dict[str, float]:
    """Some numbers from the beginning of a JSON object that can be long: ``trainer_state.json`` holds the whole log.

    Only its first 64 KB are looked at, and whether it ends as an object does.
    """
    source = store.open(path)
    try:
        head = read(source, 0, min(source.size, 1 << 16)).lstrip()
        tail = read(source, max(0, source.size - 64), min(source.size, 64)).rstrip()
    finally:
        source.close()
    if not head.startswith(b"{") or not tail.endswith(b"}"):
        raise damaged("is not a whole JSON object: its writing was cut off")
    found = {k: re.search(rb'"%s"\s*:\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)' % k.encode(), head) for k in keys}
    return {k: float(m[1]) for k, m in found.items() if m}
