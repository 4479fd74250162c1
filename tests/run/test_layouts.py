"""Every way of splitting a model over ranks: no hang, and each rank ends as if the bad batch had never come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from run.launch import different, incidents, plain, run_guarded
from run.layouts import COMMON, FOUR, TWO
from support.ranks import on_ranks

pytestmark = pytest.mark.slow


def train(rank: int, folder: str, scripts: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Each script without the bad batch, with it, and with it under the guard."""
    found = {}
    for i, (name, source) in enumerate(scripts.items()):
        place = Path(folder, f"{i}-{rank}")
        place.mkdir()
        without = plain(place, COMMON + source, "without")["state"]
        bare = plain(place, COMMON + source, "bad")["state"]
        ran = run_guarded(str(place / "plain.py"), Path(folder, f"{i}-run"), "bad")
        found[name] = {
            "harmed": bool(different(bare, without)),
            "different": different(ran.main["state"], without),
            "steps": [(a["steps"], a["updates"]) for a in ran.outcome.guarded],
            "not guarded": dict(ran.outcome.not_guarded),
        }
    return found


def run_all(scripts: dict[str, str], world: int, folder: Path) -> dict[str, dict[str, Any]]:
    ranks = on_ranks(train, str(folder), scripts, world=world, timeout=800)
    return {
        name: {"ranks": [r[name] for r in ranks], "incidents": incidents(folder / f"{i}-run")}
        for i, name in enumerate(scripts)
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_all(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_all(FOUR, 4, tmp_path_factory.mktemp("four"))


def check(found: dict[str, Any]) -> None:
    assert any(r["harmed"] for r in found["ranks"]), "void: bare, the bad batch does no harm"
    assert [r["different"] for r in found["ranks"]] == [[] for _ in found["ranks"]]
    assert [r["not guarded"] for r in found["ranks"]] == [{} for _ in found["ranks"]]
    assert len({tuple(r["steps"]) for r in found["ranks"]}) == 1, "every rank counts the same steps and updates"


@pytest.mark.parametrize("name", [n for n in TWO if "join" not in n])
def test_two_ranks(name: str, two: dict[str, dict[str, Any]]) -> None:
    found = two[name]
    check(found)
    (first,) = [i for i in found["incidents"] if i["rank"] == 0]
    if name == "tensor parallel":
        assert first["verdict"]["rank"] == 0, "the bad value is on both ranks, and the lowest is named"
    elif "collectives inside" in name:
        assert (first["verdict"]["level"], first["verdict"]["rank"]) == ("input", 1), "its input was bad, on rank 1"
        # no rank can replay by itself: all do so together, and each says what it sees
        assert first["location"]["mechanism"] == "communication", "good before the reduction, bad after it"
        (second,) = [i for i in found["incidents"] if i["rank"] == 1]
        assert second["location"]["leaf"].startswith("batch"), second["location"]
    else:
        assert {i["verdict"]["rank"] for i in found["incidents"]} == {1}
        assert any(n.startswith("rank 1: ") for n in first["notes"]), "the first rank says what the culprit found"


def test_ranks_with_uneven_data(two: dict[str, dict[str, Any]]) -> None:
    ranks = two["DDP inside join, uneven batches"]["ranks"]
    assert any(r["harmed"] for r in ranks)
    assert [r["different"] for r in ranks] == [[], []]
    assert [r["steps"] for r in ranks] == [[(16, 14)], [(14, 12)]]


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(name: str, four: dict[str, dict[str, Any]]) -> None:
    check(four[name])
