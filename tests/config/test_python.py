"""Python files, read and never run: what they set, checked against what running them gives."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from nanproof.config import load
from nanproof.config.calls import find_calls
from nanproof.config.case import _NAMES, DEFAULTS
from nanproof.config.code import Code
from nanproof.config.project import Project, python_files
from nanproof.config.pythonfile import values
from nanproof.config.reads import Reads

CONFIG = """
import dataclasses
from dataclasses import dataclass, field
import argparse
BASE = 2e-4
learning_rate = BASE * 2
steps: int = 2**10
optimizer = dict(type="AdamW", lr=BASE, betas=(0.9, 0.95), inner={"eps": 1e-8, "names": ["a", "b"]})
STAGES = [dict(n=2, lr=1e-4), dict(n=4, lr=-1e-4)]
half = 1 / 2
empty = None

@dataclass
class Train:
    lr: float = 3e-4
    betas: tuple = (0.9, 0.999)
    eps: float = field(default=1e-6)
    warm: list = field(default_factory=lambda: [1, 2])

class Plain:
    clip = 1.0

parser = argparse.ArgumentParser()
parser.add_argument("--lr", "--learning-rate", type=float, default=1e-3)
parser.add_argument("--grad-clip", type=float, default=float("1.5"))
parser.add_argument("--amp", action="store_true")
parser.add_argument("-e", "--epochs", dest="n_epochs", default=10)
"""


def test_it_agrees_with_running_the_file() -> None:
    module: dict[str, Any] = {"__name__": "config_under_test"}
    sys.modules["config_under_test"] = type(sys)("config_under_test")
    exec(CONFIG, module)  # our own text, a few lines above
    found = {v.key: v.value for v in values(Code.parse("c.py", CONFIG))}
    for name in ("BASE", "learning_rate", "steps", "half", "empty"):
        assert found[name] == module[name]
    assert found["optimizer.lr"] == module["optimizer"]["lr"]
    assert found["optimizer.betas"] == module["optimizer"]["betas"]
    assert found["optimizer.inner.names"] == tuple(module["optimizer"]["inner"]["names"])
    assert [found[f"STAGES.{i}.lr"] for i in (0, 1)] == [s["lr"] for s in module["STAGES"]]
    built = module["Train"]()
    assert {f"Train.{f.name}" for f in dataclasses.fields(built)} <= set(found)
    assert all(found[f"Train.{k}"] in (v, tuple(v) if isinstance(v, list) else v) for k, v in vars(built).items())
    defaults = vars(module["parser"].parse_args([]))
    assert {k: found[k] for k in ("lr", "grad_clip", "amp", "n_epochs")} == defaults
    assert isinstance(module["parser"], argparse.ArgumentParser)


def test_places_in_python() -> None:
    text = "\ufeff# é\r\ncfg = {'lr': 1e-4, 'ü': 2}\r\n"
    value = next(v for v in values(Code.parse("c.py", text)) if v.key == "cfg.ü")
    assert (value.line, value.text) == (2, "2")
    assert value.span is not None
    assert text.encode()[value.span[0] : value.span[1]] == b"2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("config = ml_collections.ConfigDict()\ndef get_config():\n    config.optim.lr = 2e-4\n", {"optim.lr": 2e-4}),
        ("_C.SOLVER.BASE_LR = 0.01\n", {"SOLVER.BASE_LR": 0.01}),
        ("flags.DEFINE_float('lr', 3e-4, 'rate')\n", {"lr": 3e-4}),
        ("@click.option('--clip-norm', default=1.0)\ndef f(): pass\n", {"clip_norm": 1.0}),
        ("full = TrainingConfig(learning_rate=1e-4, steps=n)\n", {"full.learning_rate": 1e-4, "full.steps": None}),
        ("lr = 1e-4 if big else 2e-4\n", {}),
        ("lr = f(1)\nlr = 2 ** 99999999\nx = 'a' * 10**9\n", {}),
    ],
)
def test_dialects_of_python(text: str, expected: dict[str, Any]) -> None:
    assert {v.key: v.value for v in values(Code.parse("c.py", text))} == expected


def test_calls_through_any_import() -> None:
    text = """
import torch as th, pytorch_lightning as pl
from torch.cuda.amp import autocast as ac, GradScaler
from torch import optim
from transformers import TrainingArguments as TA, Seq2SeqTrainingArguments
from trl import SFTConfig
DT = th.float16
with ac(): pass
with th.autocast("cuda", dtype=th.bfloat16, enabled=cfg.amp): pass
with th.amp.autocast(device_type="cpu"): pass
GradScaler(2.0 ** 16, enabled=False)
optim.AdamW(model.parameters(), 1e-4, eps=1e-8)
th.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
TA("out", fp16=True, **kw)
Seq2SeqTrainingArguments(output_dir="o", bf16=True); SFTConfig(learning_rate=lr)
pl.Trainer(precision="16-mixed")
AutoModel.from_pretrained("x", torch_dtype=DT)
self.model.half(); x.half(); model.to(th.bfloat16); model.to("cuda"); batch.to(th.float16)
"""
    found = [
        (c.name, {k: (v.value if v.known else v.text) for k, v in c.arguments.items()})
        for c in find_calls(Code.parse("t.py", text))
    ]
    assert found == [
        ("autocast", {}),
        ("autocast", {"device_type": "cuda", "dtype": "bfloat16", "enabled": "cfg.amp"}),
        ("autocast", {"device_type": "cpu"}),
        ("GradScaler", {"init_scale": 65536.0, "enabled": False}),
        ("AdamW", {"params": "model.parameters()", "lr": 1e-4, "eps": 1e-8}),
        ("clip_grad_norm_", {"parameters": "model.parameters()", "max_norm": 1.0}),
        ("TrainingArguments", {"output_dir": "out", "fp16": True}),
        ("Seq2SeqTrainingArguments", {"output_dir": "o", "bf16": True}),
        ("SFTConfig", {"learning_rate": "lr"}),
        ("Trainer", {"precision": "16-mixed"}),
        ("from_pretrained", {"pretrained_model_name_or_path": "x", "torch_dtype": "float16"}),
        ("half", {}),
        ("to", {"dtype": "bfloat16"}),
    ]
    assert [c.dotted for c in find_calls(Code.parse("t.py", text))][:2] == ["torch.cuda.amp.autocast", "torch.autocast"]


def test_the_defaults_of_the_trainer_are_its_own(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    theirs = TrainingArguments(output_dir=str(tmp_path))
    names = {**_NAMES["transformers"], "beta2": "adam_beta2"}
    ours = DEFAULTS["transformers"]
    assert {names[c]: v for c, v in ours.items()} == {names[c]: getattr(theirs, names[c]) for c in ours}


def test_a_script_is_loaded_with_its_calls(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "from transformers import TrainingArguments\nTrainingArguments('o', learning_rate=5e-4)\n"
    )
    settings = load(tmp_path / "t.py", overrides=["learning_rate=1e-4"])
    assert settings["TrainingArguments.learning_rate"].value == 5e-4
    assert settings.codes[0].path == str(tmp_path / "t.py")


READS = """
import torch, timm, yaml
from .mine import build
def run(cfg, args):
    opt = torch.optim.Adam(p, **cfg["optimizer"])
    build(cfg.model, name=cfg.name)
    timm.create_scheduler(args.sched, opt)
    for key, value in cfg.data.items():
        print(cfg)
    getattr(cfg.loss, chosen)
    float(cfg["train"]["lr"])
    x = {**cfg.extra}
    return getattr(cfg, "clip", None), cfg.get("warmup"), "ema.decay"
"""


def test_what_code_can_read() -> None:
    reads = Reads.of([Code.parse("pkg/t.py", READS)])
    alive = ["optimizer.anything", "sched.x", "data.y", "loss.z", "extra.q", "clip", "warmup", "name", "ema.decay"]
    assert [k for k in alive if not reads.may_read(k)] == []
    assert [reads.may_read(k) for k in ("model.depth", "accumulate", "train.accumulate")] == [False, False, False]
    assert "lr" in reads.converted
    whole = Reads.of([Code.parse("t.py", "from hf import parse\nparse(config)\n")])
    assert whole.may_read("anything.at.all")
    harmless = Reads.of(
        [Code.parse("t.py", "import wandb, argparse\nwandb.init(config=vars(args))\nNamespace(**cfg)\n")]
    )
    assert not harmless.may_read("accumulate")


def test_projects_skip_what_is_not_theirs(tmp_path: Path) -> None:
    for name in ("train.py", ".venv/a.py", "build/b.py", "src/c.py", "src/broken.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" if "broken" not in name else "x = (")
    assert [p.name for p in python_files([tmp_path])] == ["train.py", "broken.py", "c.py"]
    assert [Path(c.path).name for c in Project.read(tmp_path).codes] == ["train.py", "c.py"]


@pytest.mark.parametrize(
    "text", ["(" * 2000, "x = " + "-" * 20_000 + "1", "x = 1 + " * 5000 + "1", "a." * 5000 + "b = 1"]
)
def test_deep_code(text: str) -> None:
    from nanproof.errors import FormatError

    try:
        code = Code.parse("d.py", text)
    except FormatError:
        return
    assert isinstance(code.tree, ast.Module)
    list(values(code))
    Reads.of([code])
