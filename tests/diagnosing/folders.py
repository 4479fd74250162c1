"""Run folders packed in one text file: their files, and the causes that are right.

for folder in load_folders(half="dev"):
    folder.write(tmp_path)  # then diagnose tmp_path
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PACKED = Path(__file__).with_name("folders.txt")
Half = Literal["dev", "kept", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """One folder: path to text, and the accepted causes, the confirmed one first."""

    name: str
    accept: tuple[str, ...]
    files: dict[str, str]

    def write(self, root: Path) -> Path:
        for name, text in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return root


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
        name, causes, _ = (part.strip() for part in head.split("|", 2))
        files = {}
        for part in f"\n{body}".split("\n@@ ")[1:]:
            path, _, content = part.partition("\n")
            files[path.strip()] = "\n".join(_expand(content.rstrip("\n").split("\n"))) + "\n"
        yield Folder(name=name, accept=tuple(causes.split(",")), files=files)


def _expand(lines: list[str]) -> Iterator[str]:
    """``%% range(3): step {i}`` stands for three lines."""
    for line in lines:
        if not line.startswith("%% "):
            yield line
            continue
        span, _, template = line[3:].partition(": ")
        for i in eval(span, {"range": range}):
            yield eval("f" + repr(template).replace("\\\\n", "\\n").replace("\\\\t", "\\t"), {"i": i, "max": max})
