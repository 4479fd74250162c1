"""One bad sample under Trainer and SFTTrainer, before and after: the table in the docs is what really happens."""

from __future__ import annotations

import pytest

from integrations.story import Ended, on_the_page, run_all, tell

pytestmark = pytest.mark.slow

BAD_SAMPLE = {"Trainer": "61", "SFTTrainer": "15"}
Ends = dict[str, tuple[Ended, Ended]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_all(tmp_path_factory.mktemp("story"))


@pytest.mark.parametrize("trainer", BAD_SAMPLE)
def test_without_the_callback_everything_is_lost(trainer: str, ends: Ends) -> None:
    bare, _ = ends[trainer]
    first = bare.losses.index(0.0)
    assert all(loss == 0.0 for loss in bare.losses[first:])
    assert bare.finite <= 1  # an embedding that no sample uses has no gradient
    assert next(iter(bare.saved.values())) == "healthy"
    assert set(bare.left.values()) == {"corrupt"}  # the good one was deleted for it


@pytest.mark.parametrize("trainer", BAD_SAMPLE)
def test_with_the_callback_only_the_bad_step_is(trainer: str, ends: Ends) -> None:
    bare, kept = ends[trainer]
    first = bare.losses.index(0.0)
    assert [i for i, loss in enumerate(kept.losses) if loss == 0.0] == [first]
    assert [i for i, loss in enumerate(kept.raw) if loss in ("NaN", "Infinity")] == [first]
    assert kept.losses[:first] == bare.losses[:first]
    assert kept.finite == kept.tensors
    assert set(kept.saved.values()) == set(kept.left.values()) == {"healthy"}
    assert kept.incident is not None
    assert kept.incident["action"]["kind"] == "skip"
    assert BAD_SAMPLE[trainer] in kept.incident["notes"][0].partition("indices ")[2].rstrip(")").split(", ")


def test_the_table_in_the_docs_is_this(ends: Ends) -> None:
    assert tell(ends) == on_the_page(), "run python tests/integrations/story.py --write"
