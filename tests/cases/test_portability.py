"""A small part of `make portability`: the oldest instruction set, one seed. Other tests train under the newest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import portability

from nanproof.cases import find

pytestmark = pytest.mark.slow

TRAINED = {
    "mm-ldlm": ("original",),
    "radiodiff": ("original",),
    "lora-sft": ("original", "stable"),
    "restran-mhc": ("original", "stable"),
}
"""All originals must die; of the stable variants the two whose scores have once depended on the processor."""
LONG = ("mm-ldlm", "lora-sft", "restran-mhc")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.campaign] * (n in LONG)) for n in TRAINED])
def test_a_case_dies_and_is_healed_whatever_the_processor(tmp_path: Path, name: str) -> None:
    case = find(name)
    results = portability.run_setting(case, "default", [3], tmp_path, variants=TRAINED[name])
    assert [result.config for result in results] == list(TRAINED[name])
    assert portability.problems(case, results) == []
