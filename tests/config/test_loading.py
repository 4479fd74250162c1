"""Layers: code, files, saved arguments, environment, command line; each overrides the one before, both are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanproof.config import load
from nanproof.config.launch import read_launch
from nanproof.config.loading import load_quietly
from nanproof.config.meaning import Meaning
from nanproof.config.source import Source
from nanproof.errors import FormatError, UsageError


def write(folder: Path, **files: str) -> list[Path]:
    paths = []
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(text)
        paths.append(path)
    return paths


def test_the_order_of_layers(tmp_path: Path) -> None:
    paths = write(
        tmp_path,
        run__sh="export LR=9e-5\nGRAD_CLIP_NORM=0.7 torchrun train.py --lr 7e-5 --config c.yaml\n",
        c__yaml="lr: 1e-4\ngrad_clip_norm: 1.0\n",
        train__py="p.add_argument('--lr', type=float, default=1e-3)\n",
    )
    settings = load(*paths, overrides=["lr=6e-5"], arguments={"lr": 8e-5, "weird": object()})
    story = [(v.origin, v.value) for v in settings.history["lr"]]
    assert story == [
        ("argparse", 1e-3),
        ("yaml", 1e-4),
        ("training-args", 8e-5),
        ("environment", 9e-5),
        ("command-line", 7e-5),
        ("command-line", 6e-5),
    ]
    assert [(v.origin, v.value) for v in settings.history["grad_clip_norm"]] == [("yaml", 1.0), ("environment", 0.7)]
    assert not settings["weird"].known
    assert settings.overridden("lr")[0].where == f"{paths[2]}:1"


def test_environment_overrides_by_name(tmp_path: Path) -> None:
    """System A: OPTIMIZER_LR and GRAD_CLIP_NORM; PATH is not the key called path."""
    [path] = write(tmp_path, c__yaml="optimizer: {lr: 1.0e-4}\ntrain: {grad_clip_norm: 1.0}\npath: data\n")
    settings = load(path, environment={"OPTIMIZER_LR": "5e-5", "GRAD_CLIP_NORM": "0.5", "PATH": "/bin", "NNODES": "2"})
    assert [settings[k].value for k in ("optimizer.lr", "train.grad_clip_norm", "path")] == [5e-5, 0.5, "data"]
    assert settings.tell("optimizer.lr") == f"{path}:1 says 0.0001, the environment overrides it with 5e-05"


def test_a_launch_script_with_named_config(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    write(tmp_path / "conf", l2t__yaml="lr: 1e-4\nn: 1\n", l2t_stable__yaml="lr: 5e-5\nn: 2\n")
    write(
        tmp_path,
        run__sh="NAME=${NAME:-l2t_stable}\ntorchrun --nnodes=2 train.py --config-name $NAME \\\n  n=3 +new=x\n",
    )
    settings = load(tmp_path / "run.sh")
    assert [settings[k].value for k in ("lr", "n", "new", "launch.nnodes")] == [5e-5, 3, "x", 2]
    assert settings["n"].where == f"{tmp_path / 'run.sh'}:3"


def test_words_of_a_command_line() -> None:
    script = """#!/bin/bash
# python ignored.py --lr 1
BATCH=8
OUT="runs/$NAME"
accelerate launch --mixed_precision=bf16 --num_processes 4 train.py \\
    --learning-rate 2e-5 --bf16 True --fp16 --no-cache --betas 0.9 \\
    --offset -3 --batch_size ${BATCH} --opt.eps=1e-6 --deepspeed ds.json | tee log && echo --lr 5
python -m pkg.train --seed=1; python3 other.py '--name' "a b"
"""
    launch = read_launch(Source("run.sh", script))
    found = {v.key: v.value for v in launch.values}
    assert found == {
        "accelerate.mixed_precision": "bf16",
        "accelerate.num_processes": 4,
        "learning_rate": 2e-5,
        "bf16": True,
        "fp16": True,
        "cache": False,
        "betas": 0.9,
        "offset": -3,
        "batch_size": 8,
        "opt.eps": 1e-6,
        "deepspeed": "ds.json",
        "seed": 1,
        "name": "a b",
    }
    assert launch.scripts == ["train.py", "pkg.train", "other.py"]
    assert launch.configs == ["ds.json"]
    assert {v.key: v.line for v in launch.values}["offset"] == 7


def test_accelerate_and_deepspeed_keep_their_own_names(tmp_path: Path) -> None:
    paths = write(
        tmp_path,
        a__yaml="compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n",
        d__json='{"fp16": {"enabled": "auto", "loss_scale": 0}, "zero_optimization": {"stage": 3}}',
        c__yaml="fp16: true\nper_device_train_batch_size: 2\n",
    )
    settings = load(*paths, overrides=["fp16.enabled=true", "mixed_precision=no"])
    assert settings["fp16"].value is True
    assert (settings["deepspeed.fp16.enabled"].value, settings["deepspeed.fp16.enabled"].origin) == (
        True,
        "command-line",
    )
    assert [v.value for v in settings.history["accelerate.mixed_precision"]] == ["bf16", "no"]
    assert settings["deepspeed.fp16.loss_scale"].label == "fp16.loss_scale"


def test_inheritance_through_base(tmp_path: Path) -> None:
    write(tmp_path, base__yaml="SOLVER: {BASE_LR: 0.02, STEPS: [1, 2]}\n", mid__yaml="_BASE_: base.yaml\nA: 1\n")
    [path] = write(tmp_path, c__yaml="_BASE_: mid.yaml\nSOLVER: {BASE_LR: 0.01}\n")
    settings = load(path)
    assert [v.value for v in settings.history["SOLVER.BASE_LR"]] == [0.02, 0.01]
    assert settings["SOLVER.STEPS"].value == (1, 2)
    write(tmp_path, base__yaml="_BASE_: c.yaml\n")  # a circle
    assert load(path)["A"].value == 1


def test_a_section_in_the_place_of_a_value_and_back(tmp_path: Path) -> None:
    a, b, c = write(tmp_path, a__yaml="x: {y: 1, z: 2}\n", b__yaml="x: 5\n", c__yaml="x: {w: 3}\n")
    assert {v.key: v.value for v in load(a, b)} == {"x": 5}
    assert {v.key: v.value for v in load(a, b, c)} == {"x.w": 3}
    assert load(a, b).overridden("x.y")[0].value == 1


def test_lists_are_replaced_whole(tmp_path: Path) -> None:
    a, b = write(tmp_path, a__yaml="s: [{n: 1}, {n: 2}]\nb: [1, 2]\n", b__yaml="s: [{n: 3}]\nb: [4]\n")
    assert {v.key: v.value for v in load(a, b)} == {"s": (), "s.0.n": 3, "b": (4,)}


def test_numbers(tmp_path: Path) -> None:
    [path] = write(tmp_path, c__yaml="lr: 1e-4\nb: [0.9, '0.95', x]\nn: '1_0'\nt: true\nq: '3e-4'\n")
    assert load(path).numbers() == {"lr": 1e-4, "b.0": 0.9, "b.1": 0.95, "q": 3e-4}


@pytest.mark.parametrize(
    ("name", "data", "error", "words"),
    [
        ("no.yaml", None, UsageError, "cannot be read: there is no such file"),
        ("big.yaml", b"a: 1\n" * 1_000_000, UsageError, "too large"),
        ("b.yaml", b"\xff\xfe\x00a", FormatError, "not UTF-8"),
        ("training_args.bin", b"PK", UsageError, "is a checkpoint, not a config"),
        ("s.py", b"def (", FormatError, r"not Python: .* \(line 1\)"),
        ("n.py", b"a = 1\0", FormatError, "not Python"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, data: bytes | None, error: type[Exception], words: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=words):
        load(tmp_path / name)
    assert load_quietly(tmp_path / name).notes[0].startswith(str(tmp_path / name))


def test_json_without_its_ending(tmp_path: Path) -> None:
    (tmp_path / "ds_config").write_text('{"fp16": {"enabled": true, "loss_scale": 0}}')
    assert load(tmp_path / "ds_config")["deepspeed.fp16.enabled"].value is True


@pytest.mark.parametrize(
    ("text", "concept", "value"),
    [
        ("SOLVER: {BASE_LR: 0.02}", "lr", 0.02),
        ("optim: {name: adamw, lr: 2.0, sched: {name: NoamAnnealing, warmup_steps: 10000}}", "lr", 2.0),
        ("trainer: {gradient_clip_val: 0.5}", "clip_norm", 0.5),
        ("lr: 1.0e-4\ndiscriminator: {lr: 4.0e-4}", "lr", 1e-4),
        ("optimizer: {params: {lr: 0.0006, eps: 1.0e-8}}", "eps", 1e-8),
        ("train: {gradient_accumulate_every: 2}", "accumulation", 2),
        ("model: {rms_norm_eps: 1.0e-20}", "norm_eps", 1e-20),
        ("trainer: {resume_milestone: 7}", "resume_from", 7),
        ("grad-clip-norm: 1", "clip_norm", 1),
        ("warmup: linear", "warmup_steps", None),
    ],
)
def test_meaning(tmp_path: Path, text: str, concept: str, value: float | None) -> None:
    [path] = write(tmp_path, c__yaml=text)
    meaning = Meaning.of(load(path))
    assert meaning.number(concept) == value
    assert meaning.get(concept) is not None


def test_a_config_that_accelerate_wrote(tmp_path: Path) -> None:
    from accelerate.utils import write_basic_config

    for name in ("default_config.json", "default_config.yaml"):
        assert write_basic_config(mixed_precision="bf16", save_location=str(tmp_path / name))
        value = load(tmp_path / name)["accelerate.mixed_precision"]
        assert (value.value, value.origin) == ("bf16", "accelerate")


def test_arguments_that_a_trainer_saved(tmp_path: Path) -> None:
    """training_args.bin is taken apart by the checkpoint reader; what it finds is a layer like any other."""
    import torch
    from transformers import TrainingArguments

    from nanproof.checkpoint import scan

    torch.save(
        TrainingArguments(str(tmp_path), learning_rate=3e-4, bf16=True, use_cpu=True), tmp_path / "training_args.bin"
    )
    (tmp_path / "c.yaml").write_text("learning_rate: 1.0e-4\nper_device_train_batch_size: 1\n")
    arguments = scan(tmp_path / "training_args.bin").settings.arguments
    settings = load(tmp_path / "c.yaml", arguments=arguments)
    assert settings.tell("learning_rate") == (
        f"{tmp_path / 'c.yaml'}:1 says 0.0001, training_args.bin overrides it with 0.0003"
    )
    assert Meaning.of(settings).word("bf16") == "true"


def test_views_are_plain_json(tmp_path: Path) -> None:
    import json

    from nanproof.config import harden, precision
    from nanproof.records import to_json

    (tmp_path / "c.yaml").write_text("lr: .nan\nbetas: [0.9, .inf]\nfp16: true\n")
    settings = load(tmp_path / "c.yaml")
    for record in (
        settings,
        precision(settings, hardware="V100", parameters=10),
        harden(tmp_path / "c.yaml", set=["lr=1"]),
    ):
        json.dumps(to_json(record), allow_nan=False)


def test_arguments_within_variables_keep_their_lines() -> None:
    """As the scripts of Megatron have them: quotes over several lines, and arrays."""
    script = """GPT_ARGS="
    --lr 1e-4 \\
    --bf16
"
MODEL_ARGS=(
    --hidden-size 2048  # wide
    --clip-grad 1.0
)
torchrun pretrain.py $GPT_ARGS ${MODEL_ARGS[@]} --seed 1
echo don't
python eval.py --split test
"""
    found = [(v.key, v.value, v.line) for v in read_launch(Source("run.sh", script)).values]
    assert found == [
        ("lr", 1e-4, 2),
        ("bf16", True, 3),
        ("hidden_size", 2048, 6),
        ("clip_grad", 1.0, 7),
        ("seed", 1, 9),
        ("split", "test", 11),
    ]
