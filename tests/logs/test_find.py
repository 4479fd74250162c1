"""Which files of a folder are logs, and which only look like it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

from nanproof.logs import find_logs, read

LOG = "".join(f"iter {i}: loss 2.5, lr 1e-3\n" for i in range(20))
STATE = {"log_history": [{"step": 1, "loss": 2.0}], "max_steps": 9}


def names(folder: Path) -> dict[str, str]:
    return {Path(log.path).relative_to(folder).as_posix(): log.format for log in find_logs(folder)}


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_logs_of_every_kind_are_found_by_what_is_in_them(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "train.log": LOG,
            "slurm-123.out": "hello\n" + LOG,
            "no_suffix": LOG,
            "old/train.log.2.gz": gzip.compress(LOG.encode()),
            "metrics.jsonl": '{"step": 1, "loss": 2.0}\n',
            "vis.json": '{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.0}\n',
            "results.csv": "epoch, train/box_loss\n1, 0.5\n",
            "summary.csv": "1,2.0,1.5,7.7,24.0\n2,nan,1.5,7.7,24.0\n",
            "overflow.txt": "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 64, reducing to 32\n",
            "hf/checkpoint-9/trainer_state.json": json.dumps(STATE),
            "hf/checkpoint-10/trainer_state.json": json.dumps(STATE),
            "last/trainer_state.json": json.dumps(STATE, indent=1),
            "run/training_log.jsonl": '{"step": 1, "loss": 2.0, "grad_norm": 1.0}\n',
            "run/incidents/000001/incident.json": "{}",
        },
    )
    assert names(tmp_path) == {
        "train.log": "text",
        "slurm-123.out": "text",
        "no_suffix": "text",
        "old/train.log.2.gz": "text, gzip",
        "metrics.jsonl": "jsonl",
        "vis.json": "jsonl",
        "results.csv": "csv",
        "summary.csv": "csv",
        "overflow.txt": "text",
        "hf/checkpoint-10/trainer_state.json": "trainer state",
        "last/trainer_state.json": "trainer state",
        "run": "nanproof",
    }
    for log in find_logs(tmp_path):
        assert read(log.path).rows > 0 or log.path.endswith("overflow.txt")


def test_what_only_looks_like_a_log(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "train.py": f'print("{LOG[:17]}")\n',
            "README.md": LOG,
            "config.yaml": "loss: 0.5\nlr: 0.1\n",
            "config.json": '{\n "loss": 0.5,\n "loss_scale": 65536\n}\n',
            "notes.txt": "the loss of data was great\n",
            "data.jsonl": '{"text": "the loss: 3.5 of it", "label": 1}\n' * 3,
            "weights.pt": b"PK\3\4" + b"\0" * 500,
            "blob": bytes(range(256)) * 40,
            "empty.log": "",
            ".hidden.log": LOG,
            ".git/train.log": LOG,
            "node_modules/a.log": LOG,
            "changes": "fixed an integer overflow detected by a fuzzer\nloss of precision\n",
            "table.csv": "name,age\nx,3\n",
        },
    )
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
    assert names(tmp_path) == {}
    assert find_logs(tmp_path / "none") == ()


def test_a_loss_at_the_end_of_a_long_file_is_seen(tmp_path: Path) -> None:
    write(tmp_path, {"long.log": "setting up, line after line of nothing\n" * 20_000 + LOG})
    assert names(tmp_path) == {"long.log": "text"}


def test_the_newest_first_and_links_once(tmp_path: Path) -> None:
    write(tmp_path, {"a.log": LOG, "b.log": LOG})
    os.utime(tmp_path / "a.log", (1, 1))
    (tmp_path / "latest.log").symlink_to("b.log")
    assert [Path(log.path).name for log in find_logs(tmp_path)] == ["b.log", "a.log"]
    assert [Path(log.path).name for log in find_logs(tmp_path / "a.log")] == ["a.log"]
