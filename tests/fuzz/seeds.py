"""Small inputs of every kind, to begin from: what the libraries write, and what attacks are made of."""

from __future__ import annotations

import io
import json
import pickle
import tempfile
import warnings
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save

from checkpoint.attacks import ways

DICTIONARY = [
    "torch._utils",
    "_rebuild_tensor_v2",
    "collections",
    "OrderedDict",
    "storage",
    "FloatStorage",
    "os",
    "system",
    "cpu",
    "argparse",
    "Namespace",
    "__setstate__",
    "append",
    "numpy",
    "dtype",
    r"\x80\x02",
    r"\x80\x04",
    r"\x93",
    r"\x81",
    r"\x85R",
    r"cos\x0asystem\x0a",
    r"ccollections\x0aOrderedDict\x0a",
    r"PK\x03\x04",
    r"PK\x01\x02",
    r"PK\x05\x06",
    "data.pkl",
    '\\"dtype\\":\\"F32\\"',
    '\\"shape\\":[2,2]',
    '\\"data_offsets\\":[0,16]',
    "__metadata__",
    "loss: nan",
    "step",
    "torch.log(",
    "torch.softmax(",
    "defaults:",
    "${",
    "*a",
    "&a",
    "1e-3",
]


def seeds(target: str) -> list[bytes]:
    """What to begin with."""
    zip_, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.ones(2, 2)}, zip_)
    torch.save({"w": torch.ones(2, 2)}, legacy, _use_new_zipfile_serialization=False)
    pickles = [data for name, data in ways() if name.endswith(".pkl") and len(data) < 2000]
    pickles += [b"\x93NUMPY", b"PK\5\6"]
    pickles += [pickle.dumps({"a": [1, 2.5, (None, True)], "b": {1, 2}, "c": b"x"}, p) for p in range(6)]
    numbers = save({"w": torch.ones(4, 4)})
    log = b"".join(json.dumps({"step": i, "loss": 1.0 / (i + 1)}).encode() + b"\n" for i in range(4))
    plain = {
        "pickle": pickles,
        "dcp": pickles[:6],
        "zip": [zip_.getvalue()],
        "legacy": [legacy.getvalue(), *pickles[:4]],
        "safetensors": [numbers, numbers[8:-64]],
        "gguf": [b"\3\0\0\0" + bytes(16)],
        "log": [b"\1" + log, b"\1" + log + b'{"step": 4, "loss": NaN}\n', b"\2step,loss\n1,2.0\n2,nan\n", b"\3[]"],
        "events": [bytes(12)],
        "config": [b"\0a: {b: [1, 2]}\nc: &x 1\nd: *x\n", b"\1[a]\nb = 1\n", b"\2{}"],
        "override": [b"a.b=[1,2]", b"+a={b:1}", b"~a", b"a=${b}", b"a=int(3.7)", b"a@b=c", b"a='it\\'s'"],
        "hydra": [
            b"lr: ${group.lr}\n\xff# @package _global_\nlr: 1e-3\n\xff+a={b:1}",
            b"x: &a [1, *a]\n\xfflr: ${..x}\n",
        ],
    }
    written = {
        "weights": _pickles,
        "dcp": _index,
        "gguf": _gguf,
        "events": _event,
        "wandb": _wandb,
        "lint": _examples,
        "log": _logs,
    }
    return [*plain.get(target, []), *(written[target]() if target in written else [])] or [b""]


def _pickles() -> list[bytes]:
    """The pickles of torch zips: views, other formats, shared storages, parameters."""
    weight = torch.ones(2, 2)
    trees = [
        {"w": weight},
        {"w": weight.t(), "v": weight[0]},
        {"w": torch.ones(8).bfloat16(), "n": torch.zeros(4)},
        {"p": torch.nn.Parameter(weight), "step": 3, "lr": 1e-4},
    ]
    found = []
    for tree in trees:
        buffer = io.BytesIO()
        torch.save(tree, buffer)
        archive = zipfile.ZipFile(buffer)
        found.append(archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl"))))
    return found


def _index() -> list[bytes]:
    """The ``.metadata`` of a DCP folder."""
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(2, 2)}, checkpoint_id=folder, no_dist=True)
        return [(Path(folder) / ".metadata").read_bytes()]


def _gguf() -> list[bytes]:
    """A file without its magic, which the target puts in front."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    with tempfile.TemporaryDirectory() as folder:
        writer = GGUFWriter(Path(folder) / "a.gguf", "llama")
        writer.add_context_length(8)
        writer.add_array("names", ["a", "b"])
        writer.add_tensor("w", np.ones((2, 32), dtype=np.float32))
        writer.add_tensor("q", np.zeros((1, 34), dtype=np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return [(Path(folder) / "a.gguf").read_bytes()[4:]]


def _examples() -> list[bytes]:
    """What each rule finds, and what it is silent about."""
    from nanproof.linting.catalogue import all_rules

    return [text.encode()[:600] for rule in all_rules() for text in (rule.bad, rule.good)]


def _logs() -> list[bytes]:
    """A line of each layout of text logs."""
    from logs.samples import CASES

    return [b"\0" + text.encode()[:400] for text, _, _ in CASES.values()]


def _event() -> list[bytes]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag="loss", simple_value=2.5), Summary.Value(tag="lr", simple_value=float("nan"))]
    return [bytes(Event(step=3, wall_time=1.0, summary=Summary(value=values)).SerializeToString())]


def _wandb() -> list[bytes]:
    from wandb.proto.wandb_internal_pb2 import HistoryItem, HistoryRecord, Record

    items = [HistoryItem(key="loss", value_json="2.5"), HistoryItem(nested_key=["a", "b"], value_json="NaN")]
    return [bytes(Record(num=1, history=HistoryRecord(item=items)).SerializeToString())]


def write(target: str, folder: Path) -> None:
    """The seeds and the inputs that were kept, as files."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate([*seeds(target), *kept(target)]):
        (folder / f"{i:04}").write_bytes(data)


def kept(target: str) -> list[bytes]:
    """Interesting inputs of earlier campaigns, one per line in hex."""
    path = Path(__file__).parent / "corpus" / f"{target}.txt"
    return [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []
