"""Versions and hardware, from the files that list them: pip freeze, requirements, locks, nvidia-smi, pip's list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ...files import file_bytes
from ..bugs import read_versions
from ..diagnosis import Looked
from ..evidence import Fact
from ..machines import read_hardware
from .part import Part, name_in

NAMES = re.compile(
    r"(?i)(requirements.*|.*freeze.*|constraints.*|environment.*|conda.*|pip.?list.*|versions?)\.(txt|ya?ml|lock|json)|"
    r"(uv|poetry|pdm|Pipfile)\.lock|nvidia-?smi.*|gpu.*\.(txt|log)|collect_env.*|wandb-metadata\.json|.*dmesg.*"
)
MAX_BYTES = 2 << 20
MAX_FILES = 40
_FROZEN = re.compile(r"(?m)^([A-Za-z0-9_.-]+)\s*(?:==|\s{2,}|=)\s*v?(\d[\w.+-]*)")
_SMI = re.compile(r"(?m)NVIDIA-SMI|^\|\s+\d+\s+(NVIDIA|Tesla|GeForce)")
_SMI_NAME = re.compile(r"(?m)^\|\s+\d+\s+((?:NVIDIA |Tesla |GeForce |Quadro )[\w .-]+?)\s{2,}")
_XID = re.compile(r"NVRM: Xid \([^)]{0,60}\): (\d+)")


def read_environment(paths: Sequence[Path], root: Path) -> Part:
    """Facts from the files that describe where the run ran. A range such as ``torch>=2`` is no version."""
    facts: list[Fact] = []
    looked: list[Looked] = []
    for path in sorted(paths)[:MAX_FILES]:
        name = name_in(root, path)
        try:
            text = file_bytes(path)[:MAX_BYTES].decode("utf-8", "replace")
        except OSError as error:
            looked.append(Looked(mark="✗", what="environment", found=f"{name}: {error.strerror}"))
            continue
        own = read_text_of_environment(text, name)
        facts += own
        if own:
            told = ", ".join(dict.fromkeys(str(f.said) for f in own[:4]))
            looked.append(Looked(mark="✓", what="environment", found=f"{name}: {told}"))
    return Part(facts=tuple(facts), looked=tuple(looked))


def read_text_of_environment(text: str, name: str) -> list[Fact]:
    """The facts of one file.

    >>> [f.said for f in read_text_of_environment("torch==2.5.0\\ndeepspeed==0.15.4\\nnumpy>=1.2", "pip.txt")]
    ['version-torch 2.5.0', 'version-deepspeed 0.15.4']
    """
    frozen = "\n".join(f"{package}=={version}" for package, version in _FROZEN.findall(text))
    facts = list(read_versions(frozen, where=name))
    if _SMI.search(text):
        names = _SMI_NAME.findall(text)
        counted = f"{len(names)}x {names[0]}" if names else text[:4000]
        facts += [f for f in read_hardware(counted, where=name) if f.name != "gpus"]
    gpu = re.search(r'"gpu"\s*:\s*"([^"]{1,80})"', text)
    if gpu:
        facts += read_hardware(gpu[1], where=name)
    for code in dict.fromkeys(_XID.findall(text)):
        facts.append(Fact(name="xid-error", where=name, words=f"Xid {code} in the kernel log"))
    return facts
