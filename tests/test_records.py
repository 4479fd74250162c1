"""Records round-trip, keep what they do not know, and refuse what is newer than they are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof.errors import FormatError
from nanproof.records import Action, Incident, Reading, TensorFacts, Verdict, from_json, to_json
from nanproof.schema import schema_of

floats = st.floats(allow_nan=False) | st.sampled_from([math.inf, -math.inf])
names = st.lists(st.text(max_size=8), max_size=3).map(tuple)
verdicts = st.builds(
    Verdict,
    kind=st.sampled_from(["ok", "nonfinite", "spike"]),
    step=st.integers(0, 10**9),
    level=st.sampled_from([None, "loss", "gradient"]),
    names=names,
    value=st.none() | floats,
    rank=st.none() | st.integers(0, 9999),
)
readings = st.builds(
    Reading,
    step=st.integers(0, 10**9),
    loss=floats,
    grad_norm=floats,
    lr=floats,
    components=st.dictionaries(st.text(max_size=4), floats, max_size=2),
    scale=st.none() | floats,
    bad=names,
)
incidents = st.builds(
    Incident,
    id=st.text(min_size=1, max_size=9),
    step=st.integers(0, 10**9),
    time=st.just("2026-01-01T00:00:00Z"),
    rank=st.integers(0, 9),
    world_size=st.integers(1, 9),
    verdict=verdicts,
    action=st.builds(Action, kind=st.sampled_from(["skip", "stop"]), reason=st.text(max_size=9)),
    readings=st.lists(readings, max_size=2).map(tuple),
    tensors=st.just((TensorFacts(name="w", shape=(2, 3), dtype="float32", nan=1, first_bad=(0, 1)),)),
)

SCHEMA = jsonschema.Draft202012Validator(schema_of(Incident))


@settings(max_examples=40)
@given(incidents)
def test_an_incident_survives_strict_json_and_fits_its_schema(incident: Incident) -> None:
    text = json.dumps(incident.to_json(), allow_nan=False)
    SCHEMA.validate(json.loads(text))
    assert Incident.from_json(json.loads(text)) == incident


def example() -> Incident:
    return Incident(
        id="000007-r0",
        step=7,
        time="2026-01-01T00:00:00Z",
        rank=0,
        world_size=1,
        verdict=Verdict(kind="nonfinite", step=7, level="loss", value=math.nan),
        action=Action(kind="skip"),
    )


def test_nan_is_written_as_a_word_and_read_back() -> None:
    data = example().to_json()
    assert data["verdict"]["value"] == "NaN"
    value = Incident.from_json(data).verdict.value
    assert value is not None
    assert math.isnan(value)


def test_unknown_fields_are_kept() -> None:
    data = {**example().to_json(), "from_the_future": {"deep": [1, None]}}
    assert Incident.from_json(data).to_json() == data


def test_a_newer_version_is_refused() -> None:
    with pytest.raises(FormatError, match=r"schema version 2, this nanproof knows 1\. Next: update nanproof"):
        Incident.from_json({**example().to_json(), "version": 2})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": 3}, r"Incident\.verdict must be an object"),
        ({"step": "x"}, r"Incident\.step must be int, not str"),
        ({"step": True}, r"Incident\.step must be int, not bool"),
        ({"action": {"kind": "dance"}}, r"Incident\.action\.kind is 'dance'"),
        ({"action": {}}, r"Incident\.action has no kind"),
        ({"tensors": 1}, r"Incident\.tensors must be a list"),
        ({"environment": []}, r"Incident\.environment must be an object"),
        ({"verdict": {"kind": "ok", "step": 1, "value": "seven"}}, r"value must be float, not str"),
    ],
)
def test_a_wrong_type_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        Incident.from_json({**example().to_json(), **change})


@pytest.mark.parametrize("data", [None, [], {}, {"version": 1}, "x"])
def test_something_else_is_not_an_incident(data: object) -> None:
    with pytest.raises(FormatError, match="not an incident record"):
        Incident.from_json(data)


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="set has no JSON form"):
        to_json({"a": {1}})


def test_records_read_as_sentences() -> None:
    facts = TensorFacts(
        name="w",
        shape=(2, 3),
        dtype="bfloat16",
        nan=1,
        posinf=2,
        finite_min=-1.0,
        finite_max=2.0,
        extra={"alpha": 0.5},
    )
    assert str(facts) == "w [2, 3] bfloat16: 1 NaN + 2 +Inf of 6, finite -1 … 2, alpha=0.5"
    spike = Verdict(kind="spike", step=10, level="gradient", value=50.0, limit=8.0, rank=3)
    assert str(spike) == "step 10: spike gradient 50 above 8 on rank 3"
    assert from_json(Verdict, to_json(spike)) == spike


def test_the_published_schema_is_the_current_one() -> None:
    published = Path(__file__).parent.parent / "docs" / "incident.schema.json"
    assert json.loads(published.read_text()) == schema_of(Incident)
