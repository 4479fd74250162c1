"""Which reader takes a file: by its first bytes, never by its name alone."""

from __future__ import annotations

from .calls import Calls
from .contents import Contents
from .flaws import damaged, refused, unreadable
from .source import Source, read

EXTENSIONS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf", ".pkl", ".pickle", ".distcp", ".tar")
# Files that lie beside checkpoints and are not held against them; but some can execute what they hold when loaded.
BESIDE = tuple(
    f".{w}"
    for w in ["joblib", "dill", "npy", "npz", "zip", "7z", "h5", "hdf5", "keras", "pb", "dat", "data", "nemo", "mar"]
)
# How files begin that hold pickles under any name: pickles, archives, compressed streams.
HOLDERS = (b"\x80", b"PK", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"\x93NUMPY", b"]\0\0")


def looks_like_safetensors(head: bytes, size: int) -> bool:
    """A length that fits the file, then an opening brace."""
    return len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") + 8 <= size


def may_be_checkpoint(name: str, head: bytes, size: int) -> bool:
    """By its name or its first nine bytes; logs, configs and code are neither."""
    known = name.lower().endswith((*EXTENSIONS, ".index.json")) or head.startswith((b"PK\3\4", b"GGUF", b"\x80"))
    return known or looks_like_safetensors(head, size)


def read_file(source: Source, *, check: bool = True, seen: Calls | None = None, later: bool = False) -> Contents:
    """The contents of one file, whatever it is; raises `Flaw` when it is nothing known.

    What its pickles would call is in ``seen``, also if it raises. With ``later``, the caller asks ``confirm``.
    """
    seen = Calls() if seen is None else seen
    if source.size == 0:
        raise damaged("is empty")
    head = read(source, 0, min(source.size, 512))
    name = source.name.lower()
    # readers are imported when they are needed: a scan should start in a blink
    if head[:4] == b"PK\3\4":
        from .torchzip import read_torch_zip

        return read_torch_zip(source, check=check, seen=seen, later=later)
    if head[:4] == b"GGUF":
        from .gguf import read_gguf

        return read_gguf(source)
    if looks_like_safetensors(head, source.size) or name.endswith(".safetensors"):
        from .safetensors import read_safetensors

        return read_safetensors(source)
    if head[257:262] == b"ustar":
        raise refused("is a tar archive, as torch wrote before 0.1.10; load and save it with a torch of that time")
    if head[0] == 0x80 or _is_text_pickle(source, head):
        from .legacy import read_pickle

        return read_pickle(source, seen)
    if head[:4] in (b"PK\5\6", b"PK\1\2"):
        raise damaged("is the tail of a zip file without its beginning")
    if head.count(0) == len(head):
        raise damaged("begins with zeros only, as a file does whose writing was cut off")
    raise unreadable(f"is {_OTHERS.get(head[:2], 'in an unrecognized checkpoint format')}")


_OTHERS = {
    b"7z": "a 7z archive; unpack it and scan what is inside",
    b"\x1f\x8b": "compressed by gzip; unpack it and scan what is inside",
    b"BZ": "compressed by bzip2; unpack it and scan what is inside",
    b"\xfd7": "compressed by xz; unpack it and scan what is inside",
    b"\x93N": "a numpy array, not a checkpoint",
}


def _is_text_pickle(source: Source, head: bytes) -> bool:
    """Whether a file without a protocol number is a pickle of protocol 0 or 1 all the same."""
    from .opcodes import NeedMore, survey

    if head[0] not in b"(c]})lid":
        return False
    try:
        return survey(read(source, 0, min(source.size, 1 << 20))).flaw is None
    except NeedMore:
        return source.size > 1 << 20
