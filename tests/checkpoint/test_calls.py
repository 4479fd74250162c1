"""A checkpoint that would call something says so, by name; the names that real checkpoints need stay silent."""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib
import inspect
import io
import pickle
import random
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkpoint import attacks, differential
from checkpoint.attacks import DANGEROUS, RUN, beside_weights, call, library_streams, split, ways, weights, zipped
from nanproof.checkpoint import scan, scan_series
from nanproof.checkpoint.names import DTENSOR, ORDINARY, WEIGHTS_ONLY, is_dangerous


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_dangerous_name_beside_good_weights_is_named_with_its_argument(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(beside_weights(call(name)))
    report = scan(path)
    assert report.health == "suspect"
    assert any(
        name in reason and attacks.MARK in reason and "known to be dangerous" in reason for reason in report.calls
    )
    assert len(report.tensors) == 2


def test_an_unknown_name_that_would_be_called_makes_it_suspect(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(beside_weights(call("my_project.config.Config")))
    report = scan(path)
    assert report.health == "suspect"
    assert report.calls == ("would call my_project.config.Config('touch CANARY'), a name that checkpoints do not need",)


def test_an_unknown_name_that_is_only_mentioned_is_a_note_and_a_dangerous_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(beside_weights(b"cmy_project\nactivation\n"))
    report = scan(path)
    assert report.health == "healthy"
    assert report.notes == ("names my_project.activation, without calling it",)
    path.write_bytes(beside_weights(b"cos\nsystem\n"))
    report = scan(path)
    assert report.health == "suspect"
    assert report.reasons == ("names os.system, which is known to be dangerous",)


@pytest.mark.parametrize(("file", "data"), [pytest.param(*way, id=way[0]) for way in ways()])
def test_every_way_to_call_is_seen(tmp_path: Path, file: str, data: bytes) -> None:
    path = tmp_path / file
    path.write_bytes(data)
    report = scan(path)
    assert report.health != "healthy"
    assert any("collect_env.run" in reason for reason in report.reasons), report.reasons


def test_the_ways_really_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own unpickler does what the attacks say: they are no invention."""
    import torch.utils.collect_env

    plain = {name: data for name, data in ways() if name.endswith(".pkl") and not name.startswith(("from", "frame"))}
    called: list[object] = []
    monkeypatch.setattr(torch.utils.collect_env, "run", lambda *args: called.append(args))
    for name, data in plain.items():
        called.clear()
        stream = io.BytesIO(data)
        try:
            while stream.tell() < len(data):
                pickle.load(stream)
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError):
            pass
        assert called, name


def test_weights_behind_damage_name_nothing(tmp_path: Path) -> None:
    """In megabytes of weights any short name turns up by chance."""
    path = tmp_path / "model.safetensors"
    rng = np.random.default_rng(0)
    for _ in range(8):
        path.write_bytes(b"\xff" * 8 + rng.bytes(4 << 20))
        report = scan(path)
        assert report.health == "damaged"
        assert report.calls == ()


def test_a_pickle_beside_the_weights_that_is_too_long_to_look_through_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(zipped({**attacks.members(weights()), "constants.pkl": b"\x80\x02" + bytes(33 << 20)}))
    report = scan(path)
    assert report.health == "refused"
    assert report.reasons == ("archive/constants.pkl is a pickle of 33 MB that no tensor needs",)


def test_python_runs_what_hides_behind_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from a file; versions since 3.13.15 and 3.14.7 refuse it."""
    import torch.utils.collect_env

    data = dict(ways())["frame.pkl"]
    called: list[object] = []
    monkeypatch.setattr(torch.utils.collect_env, "run", lambda *args: called.append(args))
    path = tmp_path / "frame.pkl"
    path.write_bytes(data)
    refused = False
    try:
        with path.open("rb") as file:
            pickle.load(file)
    except pickle.UnpicklingError:
        refused = True
    assert refused or called == [(attacks.MARK,)]


@pytest.mark.parametrize("protocol", [4, 5])
def test_frames_of_real_pickles_are_fine(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps([1.0, b"y" * 100_000, "x" * 70_000, list(range(40_000)), np.ones(70_000)], protocol))
    report = scan(path)
    assert (report.health, [t.shape for t in report]) == ("healthy", [(70_000,)])


@pytest.mark.parametrize("protocol", range(6))
def test_an_array_of_numpy_is_read_from_every_protocol(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps({"w": np.array([[1.0, np.nan]])}, protocol))
    report = scan(path)
    assert (report.health, [(t.name, t.shape) for t in report.bad]) == ("corrupt", [("w", (1, 2))])


FILES_BESIDE = {
    "tokenizer.pkl": lambda: b"\x80\x02" + call(RUN) + b".",
    "extra.pickle": lambda: b"\x80\x02" + call(RUN) + b".",
    "scaler.joblib": lambda: b"\x80\x02" + call(RUN) + b".",
    "objects.npy": lambda: dict(attacks.nested())["objects.npy"],
    "pack.zip": lambda: dict(attacks.nested())["other.zip"],
    "data.dat": lambda: dict(attacks.nested())["packed.pkl.gz"],
}


@pytest.mark.parametrize("whole", [True, False], ids=["in a checkpoint", "in a folder"])
@pytest.mark.parametrize("name", FILES_BESIDE)
def test_a_dangerous_file_beside_good_weights_is_found_in_a_folder(tmp_path: Path, name: str, whole: bool) -> None:
    torch.save(weights(), tmp_path / "pytorch_model.bin")
    if whole:
        (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / name).write_bytes(FILES_BESIDE[name]())
    series = scan_series(tmp_path)
    assert not series.ok
    assert any("collect_env.run" in words for report in series for words in report.calls)


def test_harmless_files_beside_weights_are_not_held_against_them(tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib")
    torch.save(weights(), tmp_path / "step_1.pt")
    np.save(tmp_path / "predictions.npy", np.full(1000, np.nan))
    np.savez_compressed(tmp_path / "batch.npz", a=np.ones(9), b=np.array(["a", None], dtype=object))
    joblib.dump({"mean": np.ones(300), "names": ["a"]}, tmp_path / "scaler.joblib")
    (tmp_path / "notes.data").write_text("import os\nos.system('ls')\n")
    assert [(r.name, r.health) for r in scan_series(tmp_path)] == [("step_1.pt", "healthy")]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("keras.layers.Lambda", b'\x89HDF\r\n{"class_name": "Lambda", "config": {}}'),
        ("tensorflow.io.write_file", b"\x08\x01\n\x0bWriteFile_1\x12\x09WriteFile\x1a\x05input"),
        ("tensorflow.py_function", b"\x08\x01\n\x01f\x12\x0bEagerPyFunc\x1a\x05input"),
    ],
)
def test_models_of_other_libraries_are_named(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / "model.h5"
    path.write_bytes(data)
    assert f"names {name}, which is known to be dangerous" in scan(path).reasons


def test_an_archive_of_7z_is_opened(tmp_path: Path) -> None:
    import lzma

    inner = b"\x80\x02" + call(RUN) + b"."
    filters = ([{"id": lzma.FILTER_LZMA2, "preset": 6}], [{"id": lzma.FILTER_LZMA1, "preset": 6}])
    for packed in (*(lzma.compress(inner, lzma.FORMAT_RAW, filters=f) for f in filters), inner):
        path = tmp_path / "a.7z"
        path.write_bytes(b"7z\xbc\xaf\x27\x1c\0\x04" + bytes(24) + packed + bytes(60))
        report = scan(path)
        assert report.health == "unreadable"
        assert any("collect_env.run" in words for words in report.calls)


@pytest.mark.parametrize("file", library_streams())
def test_streams_of_other_libraries_are_searched(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    library = {"cloud": "cloudpickle", "dill": "dill", "job": "joblib", "packed": "joblib"}.get(
        file.split(".")[0], "numpy"
    )
    pytest.importorskip(library)
    library_streams()[file](path)
    report = scan(path)
    assert report.health != "healthy"
    word = {"cloud.pkl": "cloudpickle.", "dill.pkl": "dill."}.get(file, "posix.system")
    assert any(word in reason for reason in report.reasons), report.reasons


def test_torch_and_this_list_agree_on_what_weights_only_accepts() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    if torch.__version__.startswith("2.13"):
        assert set(_get_allowed_globals()) == WEIGHTS_ONLY
    assert set(ORDINARY) >= WEIGHTS_ONLY | DTENSOR


def test_no_ordinary_name_is_a_known_tool_and_each_has_a_reason() -> None:
    assert all(ORDINARY.values())
    assert not [name for name in ORDINARY if is_dangerous(name)]


def test_ordinary_names_exist_in_the_libraries_that_are_here() -> None:
    """A name that no library has would only widen the list."""
    gone = []
    for name in sorted(ORDINARY):
        module, attribute = name.rpartition(".")[::2]
        if module.split(".")[0] not in ("torch", "numpy", "collections", "datetime", "argparse", "types", "random"):
            continue
        if module.startswith("torch.cuda.sparse") or "core.multiarray" in module or "core.numeric" in module:
            continue  # made by torch when it starts; numpy has moved these once
        try:
            getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            gone.append(name)
    assert set(gone) <= {"torch.float4_e2m1fn_x2"}  # since torch 2.8
    assert not (gone and hasattr(torch, "float4_e2m1fn_x2"))


def _objects() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    quantized = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(quantized.parameters())
    return {
        "namespace": argparse.Namespace(lr=1e-3),
        "simple": types.SimpleNamespace(lr=1e-3),
        "path": Path("a"),
        "when": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        "delta": datetime.timedelta(1),
        "deque": collections.deque([1.0], 3),
        "default": collections.defaultdict(list, a=[1]),
        "counter": collections.Counter("aab"),
        "set": {1, 2},
        "frozen": frozenset([1]),
        "bytes": bytearray(b"x"),
        "complex": 1j,
        "slice": slice(1, 2),
        "range": range(3),
        "random": random.Random(1),
        "numpy": np.float32(1),
        "array": np.ones(3),
        "objects": np.array(["a", None], dtype=object),
        "state": np.random.RandomState(0),
        "generator": np.random.default_rng(0),
        "rng": generator.get_state(),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "size": torch.Size([1]),
        "sparse": torch.eye(2).to_sparse(),
        "module": quantized,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=9),
        "scaler": torch.amp.GradScaler("cpu"),
        "parameter": nn.Parameter(torch.ones(2)),
        "attention": nn.TransformerEncoderLayer(8, 2, 16),
        "rnn": nn.LSTM(2, 2),
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("kind", _objects())
def test_what_real_checkpoints_hold_is_not_suspect(tmp_path: Path, kind: str, protocol: int) -> None:
    path = tmp_path / "model.pt"
    torch.save({**weights(), kind: _objects()[kind]}, path, pickle_protocol=protocol)
    report = scan(path)
    assert report.calls == ()
    assert report.notes in ((), ("names torch.nn.functional.relu, without calling it",))


@pytest.mark.parametrize("name", sorted(set(ORDINARY) - WEIGHTS_ONLY))
def test_every_ordinary_name_may_be_called(tmp_path: Path, name: str) -> None:
    module, attribute = name.rpartition(".")[::2]
    path = tmp_path / "model.pt"
    path.write_bytes(beside_weights(f"c{module}\n{attribute}\n)\x81".encode("latin-1")))
    assert scan(path).calls == ()


def _policy_files() -> dict[str, bytes]:
    def saved(value: object, **options: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save(value, buffer, **options)
        return buffer.getvalue()

    files = {f"object-{kind}.pt": saved({**weights(), kind: value}) for kind, value in _objects().items()}
    files["legacy.pt"] = saved(weights(), _use_new_zipfile_serialization=False)
    files["protocol-4.pt"] = saved(weights(), pickle_protocol=4)
    files["protocol-5.pt"] = saved(weights(), pickle_protocol=5)
    files["nested.pt"] = saved({"a": [weights(), {"b": (1, 2.0, None, True, "text", b"bytes", 1 << 80)}]})
    files["ordered.pt"] = saved(nn.Linear(2, 2).state_dict())
    files["meta.pt"] = saved({"m": torch.empty(2, device="meta"), **weights()})
    files["plain.pkl"] = pickle.dumps({"a": 1.0}, protocol=2)
    files["mentioned.pt"] = beside_weights(b"cargparse\nNamespace\n")
    files["call.pt"] = beside_weights(call(RUN))
    files["list.pt"] = beside_weights(b"]N\x61")
    files["dup.pt"] = beside_weights(b"]20")
    files["constants.pt"] = zipped({**attacks.members(weights()), "constants.pkl": b"\x80\x02)."})
    return files


@pytest.mark.filterwarnings("ignore")
def test_policy_weights_only_says_what_torch_does(tmp_path: Path) -> None:
    wrong, refused = [], 0
    for name, data in _policy_files().items():
        path = tmp_path / name
        path.write_bytes(data)
        try:
            torch.load(path, weights_only=True)
            accepted = True
        except Exception:
            accepted = False
        report = scan(path, policy="weights-only")
        assert report.against is not None, name
        refused += not accepted
        if (report.against == ()) != accepted:
            wrong.append((name, accepted, report.against))
    assert wrong == []
    assert 10 < refused < len(_policy_files()) - 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_policy_weights_only_on_changed_pickles() -> None:
    """A fixed part of ``python -m checkpoint.differential``."""
    found = differential.compare(600, seed=27)
    old = torch.__version__ < torch.torch_version.TorchVersion("2.13")  # 2.7 lets an int have items
    assert [(name, against, said) for name, _, against, said in found.wrong if said or not old] == []
    assert len(found.unsure) < 20, found.unsure
    assert found.accepted > 60
    assert found.refused > 300


def test_the_comparison_with_torch_would_notice_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differential, "reasons", lambda source: [])
    assert len(differential.compare(20, seed=27).wrong) > 5


def test_attributes_of_tensors_that_are_more_than_remembered() -> None:
    from nanproof.checkpoint.torch_calls import DESCRIPTORS

    kind = nn.Parameter
    real = {n for n in dir(kind) if inspect.isdatadescriptor(inspect.getattr_static(kind, n))}
    assert real <= DESCRIPTORS


@pytest.mark.slow
@pytest.mark.parametrize(
    "instructions",
    [
        b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"Ns.",
        b"\x80\x02}" + b"Nq\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"Ns.",
        b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x02X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"q\x00" + b"c_codecs\nencode\nh\x00\x85R" * 20 + b".",
        b"\x80\x02" + b"\x8f" * 3_000_000 + b".",
    ],
    ids=["deep key", "key that doubles", "memory", "copies", "sets"],
)
def test_policy_weights_only_survives_attacks(tmp_path: Path, instructions: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(zipped({**attacks.members(weights()), "data.pkl": instructions}))
    begun = time.process_time()
    assert scan(path, policy="weights-only").against
    assert time.process_time() - begun < 20


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_value_that_is_a_dangerous_pickle_is_named(tmp_path: Path, protocol: int) -> None:
    """Loading the checkpoint does not run it; whoever unpickles the value does."""
    torch.save({**weights(), "extra": b"\x80\x02" + call(RUN) + b"."}, tmp_path / "a.pt", pickle_protocol=protocol)
    torch.save({**weights(), "extra": pickle.dumps([1.5, "text"])}, tmp_path / "b.pt", pickle_protocol=protocol)
    named = scan(tmp_path / "a.pt")
    assert named.health == "suspect"
    assert named.calls == (f"names {RUN}, which is known to be dangerous",)
    assert scan(tmp_path / "b.pt").health == "healthy"


def test_a_nested_pickle_is_not_said_to_be_in_another_member(tmp_path: Path) -> None:
    class Nested:
        def __reduce__(self) -> Any:
            return pickle.loads, (b"\x80\x02" + call(RUN) + b".",)

    torch.save({**weights(), "e": Nested()}, tmp_path / "a.pt")
    first, second = scan(tmp_path / "a.pt").calls
    assert first.startswith("would call pickle.loads")
    assert second.startswith("would run `touch CANARY` through")


def test_split_finds_the_module() -> None:
    assert split("code.InteractiveInterpreter.runcode") == ("code", "InteractiveInterpreter.runcode")
    assert split(RUN) == ("torch.utils.collect_env", "run")


def test_quarantine_takes_what_is_dangerous_and_leaves_what_is_only_unknown(tmp_path: Path) -> None:
    from nanproof.checkpoint import scan_series
    from nanproof.checkpoint.quarantine import quarantine

    run = tmp_path / "run"
    run.mkdir()
    (run / "step_1.pt").write_bytes(beside_weights(call("my_project.Config")))
    (run / "step_2.pt").write_bytes(beside_weights(call(RUN)))
    moves = quarantine(list(scan_series(run)), tmp_path / "bad")
    assert [Path(old).name for old, _ in moves] == ["step_2.pt"]
