"""Evidence that people give: nine fields, facts, and whatever else a file may hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof.diagnosing import Evidence, diagnose, diagnose_evidence
from nanproof.diagnosing.described import FIELDS, load_description, read_description
from nanproof.diagnosing.machines import read_hardware
from nanproof.diagnosing.precisions import read_precision
from nanproof.diagnosing.stated import known_names, read_facts
from nanproof.diagnosing.wording import read_text, topics
from nanproof.errors import FormatError, UsageError


def names(evidence: Evidence) -> set[str]:
    return {f.name for f in evidence}


def series(*rows: dict[str, Any]) -> set[str]:
    return names(read_description({"series": list(rows)})[0])


def test_only_the_nine_fields_are_read() -> None:
    """What names the cause, or the repair that worked, must not reach the engine."""
    told = {
        "symptoms": "loss nan",
        "flags": ["loss-nan"],
        "confirmed_cause": "ctc-infeasible",
        "secondary_cause": "warmup",
        "fix_that_worked": "lower lr, padding, CTC",
        "note": "padding",
        "id": "B14",
        "source": "ctc",
        "url": "ctc",
        "evidence_that_diagnoses": ["data"],
    }
    evidence, notes = read_description(told)
    alone, _ = read_description({k: v for k, v in told.items() if k in FIELDS})
    assert list(evidence) == list(alone)
    assert notes[0] == "ignored: confirmed_cause (not a field of evidence)"
    assert len(notes) == 8


def test_what_is_not_in_the_vocabulary_is_named() -> None:
    _, notes = read_description({"flags": ["loss-nan", "moon-phase", 3], "onset": "someday", "training": "lr 3"})
    assert notes == (
        "ignored: onset 'someday' is not in the vocabulary",
        "ignored: flag 'moon-phase' is not in the vocabulary",
        "ignored: flag '3' is not in the vocabulary",
        "ignored: training is not an object",
    )


@pytest.mark.parametrize(
    ("rows", "flags"),
    [
        ([{"step": 1, "loss": 0.69}, {"step": 2, "loss": "nan"}], {"nan-after-first-step", "loss-first-step-finite"}),
        ([{"step": 5, "loss": 0.0, "grad_norm": "nan"}], {"loss-zero-grad-nan"}),
        ([{"step": 5, "loss": 0.0, "grad_norm": 0.0}], {"loss-zero-grad-zero"}),
        ([{"step": i, "loss": v} for i, v in enumerate([2.0, 2.1, 2.0, 9.0, "nan"])], {"loss-jump-before", "loss-nan"}),
        (
            [{"step": i, "loss": v} for i, v in enumerate([2.0, 2.1, 2.0, 4.0, 8.0, 16.0, "inf"])],
            {"loss-explodes-before-nan"},
        ),
        ([{"step": i, "loss": v} for i, v in enumerate([2.0, 2.0, 6.0, 3.0, 2.0])], {"recovers"}),
        ([{"step": i, "loss": v} for i, v in enumerate([2.0, 2.0, 6.0, 3.0, 3.0])], {"spike-then-plateau"}),
        (
            [{"step": 9, "loss": 1, "lr": 1e-5}, {"step": 10, "lr": 1.1e-5}, {"step": 11, "lr": 5e-4}],
            {"lr-discontinuity"},
        ),
        ([{"step": 9, "lr": 1e-5}, {"step": 10, "lr": 1.1e-5}], {"lr-continuous"}),
        ([{"step": 1, "loss": "nan", "lr": 0.0}], {"nan-at-lr-0"}),
        ([{"step": i, "loss_scale": 2.0 ** (16 - 2 * i)} for i in range(9)], {"loss-scale-collapse"}),
        ([{"step": 1, "loss": 3.0}, {"step": 2, "loss": -40.0}], {"negative-loss"}),
        ([{"step": 1, "iou": 0.8}, {"step": 2, "iou": 1.4}], {"metric-above-bound"}),
        ([{"step": 1, "giou": "nan", "conf": 10.0}], {"one-component-nan"}),
        ([{"step": i, "loss": "nan" if i == 3 else 1.0} for i in range(8)], {"intermittent-nan", "keeps-training"}),
    ],
)
def test_the_numbers_themselves_are_read(rows: list[dict[str, Any]], flags: set[str]) -> None:
    assert flags <= series(*rows)


def test_a_ramp_is_no_jump_and_a_percent_is_no_overflow_of_a_metric() -> None:
    assert "lr-discontinuity" not in series(*({"step": i, "lr": 1e-6 * 4**i} for i in range(5)))
    assert "metric-above-bound" not in series({"step": 1, "acc": 55.0}, {"step": 2, "acc": 71.0})


def test_runs_with_prefixed_steps_are_kept_apart() -> None:
    found = series({"step": "exp1:7", "loss": 6.0, "lr": 6e-5}, {"step": "exp2:7", "loss": 2.0, "lr": 1e-3})
    assert not found & {"lr-discontinuity", "recovers", "spike-then-plateau"}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("64 nodes x 4 V100 32GB, TP/PP", {"gpu": "volta", "gpus": 256.0, "no-bf16": True, "several-nodes": True}),
        ("about 1000 A100", {"gpu": "ampere", "gpus": 1000.0}),
        ("GTX 1660 Ti", {"gpu": "turing-16xx", "no-bf16": True}),
        ("4x A6000", {"gpu": "ampere", "gpus": 4.0}),
        ("NVIDIA GeForce RTX 5090", {"gpu": "blackwell"}),
        ("MI250X", {"gpu": "amd"}),
        ("s390x CPU", {"gpu": "other-cpu"}),
        ("1 GPU", {"single-gpu": True}),
        ("2x8 H100", {"gpu": "hopper", "several-nodes": True, "gpus": 16.0}),
    ],
)
def test_hardware(text: str, facts: dict[str, object]) -> None:
    found = {f.name: f.value for f in read_hardware(text, where="hardware")}
    assert facts.items() <= found.items()


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("fp16 amp", {"precision": "fp16"}),
        ("apex O2", {"precision": "fp16"}),
        ("pure fp16 + 4bit", {"precision": "fp16", "weights": "fp16", "pure-half": True}),
        ("bf16-true", {"precision": "bf16"}),
        ("mxfp8", {"precision": "fp8"}),
        ("tf32", {"precision": "fp32"}),
        ("fp16 autocast, no scaler", {"precision": "fp16", "no-scaler": True}),
        ("whatever", {}),
    ],
)
def test_precision(text: str, facts: dict[str, object]) -> None:
    found = {f.name: f.value for f in read_precision(text, where="precision")}
    assert facts.items() <= found.items()
    assert facts or not found


def test_a_denied_topic_is_none() -> None:
    assert "data-order" in {f.value for f in read_text("after a mix change", where="s")}
    assert "data-order" not in {f.value for f in read_text("with no mix change", where="s")}
    assert "warm-up" in {f.value for f in read_text("nan without warm-up", where="s")}


def test_topics_are_matched_by_general_words_only() -> None:
    """No pattern may know an incident: none holds a name of a repository, an issue number or an identifier."""
    import re

    text = (Path(read_description.__code__.co_filename).parent / "wording.toml").read_text()
    assert not re.search(r"#\d{2,}|github|issues/|\b[A-Z]\d{2}\b", text)
    assert len(topics()) > 60


# ---------------------------------------------------------------- files of others


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[1, 2]", "is not an object of fields"),
        ('"x"', "is not an object of fields"),
        ("{" * 50_000, "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"flags": [', "is not JSON"),
    ],
)
def test_a_file_that_is_no_description(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        load_description(str(tmp_path / "e.json"))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_description(str(tmp_path / "none.json"))
    (tmp_path / "big.json").write_bytes(b" " * (5 << 20))
    with pytest.raises(UsageError, match="too large"):
        load_description(str(tmp_path / "big.json"))
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(FormatError, match="not JSON"):
        load_description(str(tmp_path / "bytes.json"))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*FIELDS, "note", "id"]), anything, max_size=6))
def test_any_json_is_taken(data: dict[str, Any]) -> None:
    evidence, notes = read_description(data)
    diagnosis = diagnose_evidence(evidence)
    json.dumps(diagnosis.to_json(), allow_nan=False)
    assert all(n.startswith("ignored: ") for n in notes)


def test_a_long_text_does_not_take_long() -> None:
    """Counted, not timed: what is read of a text is bounded."""
    text = "scale learning rate lower nan inf batch " * 20_000
    read_description({"symptoms": text, "model": text, "framework": text, "hardware": text})


# ---------------------------------------------------------------- what is stated


def test_every_name_that_is_known_is_understood() -> None:
    values = {"onset": "early", "about": "ctc", "precision": "fp16", "weights": "fp16", "optimizer": "AdamW"}
    numbers = {"loss", "grad_norm", "lr", "eps", "beta2", "clip", "warmup", "batch", "seq", "init_std", "zloss", "wd"}
    numbers |= {"gpus", "hidden", "accum"}
    from nanproof.diagnosing.bugs import PACKAGES
    from nanproof.diagnosing.questions import BY_NAME

    for name in known_names():
        value = values.get(name) or ("1.5" if name in numbers else "2.5.0" if name in PACKAGES else "yes")
        if name in BY_NAME:
            value = next(iter(BY_NAME[name].answers))
        read_facts({name: value})


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"presision": "fp16"}, "no fact is called 'presision'. Next: did you mean precision"),
        ({"precision": "round"}, "precision 'round' is not a precision"),
        ({"lr": "fast"}, "lr 'fast' is not a number"),
        ({"loss-nan": "perhaps"}, "loss-nan is yes or no"),
        ({"padding": "maybe"}, "padding cannot be 'maybe'. Next: one of yes, no"),
        ({"onset": "never"}, "onset cannot be 'never'"),
        ({"about": "football"}, "no topic 'football'"),
    ],
)
def test_what_means_nothing_is_refused(stated: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        diagnose(facts=stated)


def test_numbers_may_be_numbers_in_python() -> None:
    assert diagnose(facts={"loss": 0.0, "grad_norm": math.nan}) == diagnose(facts={"loss": "0.0", "grad_norm": "nan"})


def test_the_page_names_every_fact() -> None:
    from nanproof.diagnosing.questions import BY_NAME
    from nanproof.diagnosing.stated import MEASURED, NUMBERS, TEXTS

    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    told = {
        word.strip("` |")
        for line in page.splitlines()
        if line.startswith("| ")
        for word in line.replace(",", " ").split()
    }
    assert {*BY_NAME, *NUMBERS, *MEASURED, *TEXTS, "onset", "about"} <= told
