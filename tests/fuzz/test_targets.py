"""Every kept input once, and the reports of the readers on random ones; the campaigns themselves are ``make fuzz``."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from fuzz.seeds import kept, seeds
from fuzz.targets import TARGETS, Wrong, fuzz_pickle, fuzz_weights
from nanproof.checkpoint import finite, machine


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs(target: str) -> None:
    for data in [*seeds(target), *kept(target)]:
        TARGETS[target](data)


def test_a_campaign_has_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    import fuzzing

    assert set(fuzzing.TARGETS) == set(TARGETS)


@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"lint", "log", "config", "events", "wandb"}))
def test_mutated_seeds(target: str) -> None:
    rng = random.Random(27)
    given = [*seeds(target), *kept(target)]
    for _ in range(300):
        data = bytearray(rng.choice(given))
        for _ in range(rng.randrange(1, 5)):
            if data:
                at = rng.randrange(len(data))
                data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        TARGETS[target](bytes(data))


def test_the_comparison_would_notice_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that forgets the calls of one instruction is found out."""
    monkeypatch.setattr(machine, "reduce", lambda function, args, seen: {})
    with pytest.raises(Wrong, match=r"not reported|as a mention"):
        fuzz_pickle(b"\x80\x02cos\nsystem\nX\2\0\0\0ls\x85R.")


def test_the_comparison_would_notice_a_false_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of numbers that never finds one is found out by what torch loads."""
    monkeypatch.setattr(finite.Sweep, "bad", property(lambda self: False))
    with pytest.raises(Wrong, match="called finite"):
        fuzz_weights(seeds("weights")[2])


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [False, True], ids=["woken", "killed"])
def test_a_target_that_waits_for_ever_is_ended_and_its_input_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], deaf: bool
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import fuzzing

    from fuzz import mutate

    def wait(data: bytes) -> None:
        if deaf:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        if not data.startswith(b"warm"):
            signal.pause()

    (tmp_path / "override").mkdir()
    (tmp_path / "override" / "seed").write_bytes(b"warm")
    numbers = dict.fromkeys(fuzzing.NUMBERS, 0)
    (tmp_path / "override.json").write_text(json.dumps(numbers))
    monkeypatch.setitem(TARGETS, "override", wait)
    monkeypatch.setattr(mutate, "WAIT", 1)
    monkeypatch.setattr(mutate, "mutated", lambda given, rng: iter([b"warm", b"stuck"]))
    monkeypatch.setattr(fuzzing, "BLOCKED", 5 if deaf else 900)
    monkeypatch.setattr(fuzzing, "OUT", fuzzing.OUT / tmp_path.name)
    with capsys.disabled():  # the child prints into the file that it finds as its output
        fuzzing.mutate("override", None, time.monotonic() + 1, tmp_path, 0)
    assert json.loads((tmp_path / "override.json").read_text()) == numbers | {"inputs": 2, "crashes": 1}
    (kept,) = (p for p in fuzzing.OUT.glob("override-*") if p.suffix != ".log")
    assert kept.read_bytes() == b"stuck"
    assert ("did not end by itself" if deaf else "TooSlow") in kept.with_suffix(".log").read_text()
    shutil.rmtree(fuzzing.OUT)
