"""Known bugs: a table of data, matched against what is known of versions, GPU and settings.

>>> facts = [Fact(name="gpu", value="turing-16xx", where="hardware"), Fact(name="precision", value="fp16")]
>>> [b.said for b in find_bugs(Evidence.of(*facts)) if b.name == "known-bug"]
['GTX 16xx cards give NaN in fp16 convolutions, which AMP uses']
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .evidence import Evidence, Fact

PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "accelerate",
    "diffusers",
    "flash-attn",
    "xformers",
    "peft",
    "trl",
    "triton",
    "bitsandbytes",
    "lightning",
    "apex",
    "unsloth",
    "jax",
    "numpy",
    "torchvision",
    "ultralytics",
    "megatron-core",
    "transformer-engine",
    "datasets",
    "timm",
    "liger-kernel",
    "vllm",
    "cuda",
)
_ALIASES = {
    "pytorch": "torch",
    "flash_attn": "flash-attn",
    "flash-attention": "flash-attn",
    "pytorch-lightning": "lightning",
}
_NAMES = "|".join(sorted(map(re.escape, (*PACKAGES, *_ALIASES)), key=len, reverse=True))
_VERSION = re.compile(rf"\b({_NAMES})\s*(?:==|>=|~=|=|:|version)?\s*v?(\d+(?:\.\d+)+(?:[.+-]?\w+)*)", re.IGNORECASE)


@functools.cache
def table() -> tuple[Mapping[str, Any], ...]:
    """The rows of ``known_bugs.toml``."""
    text = Path(__file__).with_name("known_bugs.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["bug"])


def read_versions(text: str, *, where: str) -> Iterator[Fact]:
    """Versions of packages that a text names, be it prose or the output of pip.

    >>> [str(f) for f in read_versions("torch==2.6.0.dev20241112+cu124, DeepSpeed 0.15.4", where="pip.txt")]
    ['version-torch 2.6.0.dev20241112+cu124 (pip.txt)', 'torch is a nightly build (pip.txt)',
     'version-deepspeed 0.15.4 (pip.txt)']
    """
    for name, version in _VERSION.findall(text[:200_000]):
        package = _ALIASES.get(name.lower(), name.lower())
        yield Fact(name=f"version-{package}", value=version.rstrip("."), where=where)
        if package == "torch" and re.search(r"dev\d|nightly|\da0", version):
            yield Fact(name="nightly-torch", where=where, words="torch is a nightly build")


def find_bugs(evidence: Evidence) -> Iterator[Fact]:
    """For each bug that the evidence meets: the cause that it is a case of, and its remedy."""
    for bug in table():
        met = _meets(bug, evidence)
        if met:
            where = ", ".join(dict.fromkeys(f.where for f in met if f.where))
            yield Fact(name="known-bug", value=bug["cause"], where=where, words=bug["says"])
            yield Fact(name=f"remedy-{bug['cause']}", value=bug["fix"], where=where)


def _meets(bug: Mapping[str, Any], evidence: Evidence) -> tuple[Fact, ...]:
    met: list[Fact] = []
    needs = [
        *([_valued(evidence, "gpu", bug["gpu"])] if "gpu" in bug else []),
        *([_valued(evidence, "precision", bug["precision"])] if "precision" in bug else []),
        *([f for f in evidence.named(name) if f.value is True] for name in bug.get("facts", ())),
        *([[f for name in bug["any"] for f in _any(evidence, name)]] if "any" in bug else []),
        *(
            [f for f in evidence.named(f"version-{package}") if within(str(f.value), span)]
            for package, span in bug.get("versions", {}).items()
        ),
    ]
    for found in needs:
        if not found:
            return ()
        met += found
    return tuple(met)


def _valued(evidence: Evidence, name: str, values: list[str]) -> list[Fact]:
    return [f for f in evidence.named(name) if f.value in values]


def _any(evidence: Evidence, name: str) -> list[Fact]:
    kind, _, value = name.partition(":")
    return [f for f in evidence.named(kind) if (f.value == value if value else f.value is True)]


def within(version: str, span: str) -> bool:
    """Whether a version lies in a range "from-until" with both ends included.

    >>> within("0.16.4", "0.14-0.16.4"), within("0.16.5", "0.14-0.16.4"), within("2.6.0.dev1+cu124", "2.5-")
    (True, False, True)
    """
    low, _, high = span.partition("-")
    numbers = _release(version)
    return bool(numbers) and (not low or numbers >= _release(low)) and (not high or numbers <= _release(high))


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    parts = tuple(int(p[:9]) for p in match.group().split(".")) if match else ()
    return (*parts, *(0,) * (4 - len(parts))) if parts else ()
