"""What processors can compute in: bf16 from Ampere (sm80) on, fp16 from Volta's tensor cores on.

>>> find_hardware("NVIDIA A100-SXM4-80GB").bf16, find_hardware("Tesla V100").bf16, find_hardware("sm_75").bf16
(True, False, False)

The peak figures are the vendors' own, dense, in Tflop/s, for matrix products that accumulate in fp32. They bound what a
change of format can gain; a training step gains less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One family of processors."""

    name: str
    pattern: str
    bf16: bool
    fp16: bool = True
    tf32: bool = False
    peak_half: float | None = None
    peak_tf32: float | None = None
    peak_fp32: float | None = None
    note: str = ""


_KNOWN = (
    Hardware(name="B200 (Blackwell)", pattern=r"\bg?b[23]00\b", bf16=True, tf32=True),
    Hardware(
        name="H100 / H200 (Hopper)",
        pattern=r"\bg?h[12]00\b|\bh800\b|\bh20\b",
        bf16=True,
        tf32=True,
        peak_half=989,
        peak_tf32=495,
        peak_fp32=67,
    ),
    Hardware(
        name="A100 (Ampere)",
        pattern=r"\ba[18]00\b",
        bf16=True,
        tf32=True,
        peak_half=312,
        peak_tf32=156,
        peak_fp32=19.5,
    ),
    Hardware(name="RTX 50xx (Blackwell)", pattern=r"\brtx\s*50[5-9]0|rtx pro [456]000", bf16=True, tf32=True),
    Hardware(
        name="RTX 40xx, L4, L40 (Ada)",
        pattern=r"\brtx\s*40[5-9]0|\b40[5-9]0\b|\bl4\b|\bl40s?\b|rtx 6000 ada",
        bf16=True,
        tf32=True,
        note="tensor cores give 2x fp32 for bf16 and fp16 when accumulating in fp32",
    ),
    Hardware(
        name="A10, A30, A40, RTX A6000, RTX 30xx (Ampere)",
        pattern=r"\brtx\s*30[5-9]0|\b30[5-9]0\b|\ba(10g?|16|30|40|2)\b|rtx a[2-6]\d00",
        bf16=True,
        tf32=True,
    ),
    Hardware(
        name="V100, Titan V (Volta)",
        pattern=r"\bv100s?\b|titan v\b",
        bf16=False,
        peak_half=125,
        peak_fp32=15.7,
        note="torch may call bf16 supported here; it is emulated, and slower than fp32",
    ),
    Hardware(
        name="T4, RTX 20xx, Quadro RTX (Turing)",
        bf16=False,
        peak_half=65,
        peak_fp32=8.1,
        pattern=r"\bt4\b|\brtx\s*20[5-9]0|\b20[678]0\s*(ti|super)?\b|quadro rtx|titan rtx",
        note="torch may call bf16 supported here; it is emulated, and slower than fp32",
    ),
    Hardware(
        name="GTX 16xx (Turing without tensor cores)",
        pattern=r"\bgtx\s*16\d0|\b16[56]0\b",
        bf16=False,
        note="fp16 autocast is known to give NaN in convolutions on these cards",
    ),
    Hardware(
        name="P100 (Pascal)",
        pattern=r"\bp100\b",
        bf16=False,
        peak_half=18.7,
        peak_fp32=9.3,
        note="no tensor cores: fp16 gains at most 2x",
    ),
    Hardware(
        name="GTX 10xx, P40, P4 (Pascal)",
        pattern=r"\bgtx\s*10[5-8]0|\b10[78]0\s*ti\b|\bp40?\b|titan xp?\b",
        bf16=False,
        fp16=False,
        note="fp16 arithmetic runs at 1/64 of the fp32 rate",
    ),
    Hardware(name="K80, M60, M40 (Kepler, Maxwell)", pattern=r"\bk[48]0\b|\bm[46]0\b", bf16=False, fp16=False),
    Hardware(name="MI200, MI300 (CDNA 2 and 3)", pattern=r"\bmi\s?(2[015]0x?|3\d\d\w?)\b", bf16=True),
    Hardware(
        name="MI100 (CDNA)",
        pattern=r"\bmi\s?100\b",
        bf16=True,
        peak_half=184.6,
        peak_fp32=23.1,
        note="bf16 runs at half the rate of fp16",
    ),
    Hardware(name="MI25, MI50, MI60 (GCN)", pattern=r"\bmi\s?(25|50|60)\b", bf16=False),
    Hardware(name="TPU", pattern=r"\btpu\b|\bv[2-6][ep]?-\d+\b", bf16=True, fp16=False),
    Hardware(name="Gaudi", pattern=r"\bgaudi|\bhpu\b", bf16=True, fp16=False),
    Hardware(
        name="Apple GPU",
        pattern=r"\bmps\b|\bapple\b|\bm[1-4]\s*(pro|max|ultra)?\b",
        bf16=True,
        note="bf16 needs macOS 14 or later",
    ),
    Hardware(
        name="CPU",
        pattern=r"\bcpu\b|\bxeon\b|\bepyc\b",
        bf16=True,
        note="fast only with AVX512_BF16 or AMX; fp16 is slow, and autocast on cpu is bf16 by default",
    ),
)
_CAPABILITY = re.compile(r"(?:sm_?|compute capability\s*|cc\s*)(\d+)[.]?(\d)|^(\d{1,2})\.(\d)$")


def find_hardware(words: str) -> Hardware | None:
    """The family behind a name as nvidia-smi, a person or a log writes it; None when it is not known."""
    text = words.lower().replace("-", " ").replace("_", " ").strip()
    if found := _CAPABILITY.search(words.lower()):
        major, minor = int(found[1] or found[3]), int(found[2] or found[4])
        return Hardware(
            name=f"compute capability {major}.{minor}",
            pattern="",
            bf16=major >= 8,
            fp16=major >= 7 or major == 6,
            tf32=major >= 8,
        )
    return next((h for h in _KNOWN if re.search(h.pattern, text)), None)
