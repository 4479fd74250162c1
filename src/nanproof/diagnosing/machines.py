"""What a line about hardware says: the family of the GPU, how many, and what follows for precision.

>>> [str(f) for f in read_hardware("64 nodes x 4 V100 32GB", where="hardware")]
['gpu volta (hardware)', 'no bf16 on this GPU (hardware)', 'several nodes (hardware)', 'several gpus (hardware)',
 'gpus 256 (hardware)']
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .evidence import Fact

# The first that fits; GPUs before Ampere have no bf16.
_FAMILIES = (
    ("turing-16xx", r"\bgtx ?16\d\d|\b16[56]0( ?ti| ?super)?\b|\bmx450|t[45]00 laptop"),
    ("apple", r"apple|\bmps\b|\bm[1234]( (pro|max|ultra))?\b|macbook|metal"),
    ("amd", r"\bmi\d{2,3}\w?\b|\brocm|\bgfx\d{3,4}|radeon|\brx ?\d{4}|\bamd\b|7900"),
    ("npu", r"ascend|\bnpu\b|910b?\b|gaudi|\bhpu\b|cambricon|moore ?threads|kunlun|trainium|\bmlu\b"),
    ("intel", r"\bxpu\b|intel (arc|max|gpu)|\barc a\d"),
    ("tpu", r"\btpu"),
    ("blackwell", r"\bg?b[23]00\b|\bgb\d+|rtx ?50\d0|\b50[6-9]0\b|rtx pro|blackwell|sm_?1[02]\d|dgx spark"),
    ("hopper", r"\bg?h[128]00\b|\bh20\b|hopper|gh200"),
    ("ada", r"rtx ?40\d0|\b40[6-9]0\b|\bl40s?\b|\bl4\b|ada\b"),
    ("ampere", r"\ba\d{2,3}\b|\ba[2-6]000\b|rtx ?30\d0|\b30[5-9]0\b|ampere|a6000|a5000|a4000|orin"),
    ("turing", r"\bt4\b|rtx ?20\d0|\b20[6-8]0( ?ti)?\b|quadro rtx|turing|titan rtx|rtx 8000"),
    ("volta", r"\bv100|volta|titan v\b"),
    ("pascal", r"\bp100|\bp40\b|gtx ?10\d0|\b10[5-8]0( ?ti)?\b|titan x|pascal|\bk80\b|maxwell|gtx ?9\d0"),
    ("other-cpu", r"s390x|ppc64|aarch64|\barm\b|risc-?v|power ?[89]"),
    ("cpu", r"\bcpu\b"),
)
WITHOUT_BF16 = {"turing-16xx", "turing", "volta", "pascal"}
_NODES = re.compile(r"(\d+) ?(?:x )?(?:nodes|machines|hosts|servers)|multi-?\s?node|(\d+) ?[x×] ?8 ", re.IGNORECASE)
_PER_NODE = re.compile(r"nodes? ?[x×] ?(\d+)|(?:\d+) ?[x×] ?(8) ", re.IGNORECASE)
_COUNT = re.compile(
    r"(\d[\d,]*) ?(?:x|×)? ?(?:nvidia |tesla |geforce )?"
    r"(?:gpus?\b|[vahplt]\d{2,3}\b|rtx|gtx|tpu|a[456]000|mi\d|npus?\b|cards?\b|b200|gb200)",
    re.IGNORECASE,
)
_SINGLE = re.compile(r"\b(single|one|1) ?(x )?(gpu|card)|\bcolab\b|\blaptop\b", re.IGNORECASE)
_PARALLEL = re.compile(r"\b[ptcsed]p ?[>=x/]|multi-?\s?gpu|parallel", re.IGNORECASE)


def read_hardware(text: str, *, where: str) -> Iterator[Fact]:
    """Facts from a free description such as "2x RTX 3090" or the output of nvidia-smi."""
    text = text[:4000]
    family = find_family(text)
    if family:
        yield Fact(name="gpu", value=family, where=where)
        if family in WITHOUT_BF16:
            yield Fact(name="no-bf16", where=where, words="no bf16 on this GPU")
    nodes = _NODES.search(text)
    count = max((int(n.replace(",", "")[:9]) for n in _COUNT.findall(text)), default=0)
    if nodes:
        yield Fact(name="several-nodes", where=where, words="several nodes")
        number, each = next((int(g) for g in nodes.groups() if g), 0), _PER_NODE.search(text)
        count = max(count, number * int(next((g for g in each.groups() if g), 1)) if each else 0)
    if nodes or count > 1 or _PARALLEL.search(text):
        yield Fact(name="several-gpus", where=where, words="several gpus")
    elif _SINGLE.search(text) or count == 1:
        yield Fact(name="single-gpu", where=where, words="a single GPU")
    if count > 1:
        yield Fact(name="gpus", value=float(count), where=where)


def find_family(text: str) -> str:
    """The family of the GPU that a text names, "" when it names none.

    >>> find_family("NVIDIA GeForce GTX 1660 Ti"), find_family("Apple M2, torch 2.2.2"), find_family("GB200")
    ('turing-16xx', 'apple', 'blackwell')
    """
    return next((name for name, pattern in _FAMILIES if re.search(pattern, text, re.IGNORECASE)), "")
