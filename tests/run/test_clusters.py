"""The files for clusters: their shell, YAML and Python parse, and torchrun and `nanproof run` accept their commands."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from torch.distributed.run import get_args_parser

from nanproof.cli.shell import nanproof

FILES = Path(__file__).parents[2] / "docs" / "clusters"


def commands(value: Any) -> list[list[str]]:
    """Every command of a container in a nested document."""
    if isinstance(value, dict):
        found = [value["command"]] if isinstance(value.get("command"), list) else []
        return found + [c for v in value.values() for c in commands(v)]
    return [c for v in value for c in commands(v)] if isinstance(value, list) else []


def check_command(words: list[str]) -> dict[str, Any]:
    assert words[0] == "torchrun"
    given = get_args_parser().parse_args(words[1:])
    assert given.module
    assert (given.training_script, given.training_script_args[0]) == ("nanproof", "run")
    verb = nanproof.get_command(click.Context(nanproof), "run")
    assert verb is not None
    context = verb.make_context("run", list(given.training_script_args[1:]))
    return {"run_dir": str(context.params["run_dir"]), "torchrun": given}


@pytest.mark.parametrize("name", ["kubernetes.yaml", "pytorchjob.yaml"])
def test_kubernetes(name: str) -> None:
    documents = list(yaml.safe_load_all((FILES / name).read_text()))
    (command,) = commands(documents)
    assert check_command(command)["run_dir"] == "/shared/runs/train"
    mounts = re.findall(r"mountPath: (\S+)}", (FILES / name).read_text())
    assert mounts == ["/shared"], "the run's folder is on a volume that all pods see"


def test_slurm() -> None:
    script = (FILES / "slurm.sh").read_text()
    subprocess.run(["bash", "-n", FILES / "slurm.sh"], check=True)
    line = script.partition("\nsrun ")[2].replace("\\\n", " ")
    known = {"SLURM_NNODES": "4", "head": "node1", "SLURM_JOB_ID": "17", "SCRATCH": "/scratch"}
    words = shlex.split(re.sub(r"\$(\w+)", lambda m: known[m.group(1)], line))
    checked = check_command(words)
    assert checked["run_dir"] == "/scratch/runs/17"
    assert checked["torchrun"].rdzv_id == "17"


def test_ray() -> None:
    job = yaml.safe_load((FILES / "kuberay.yaml").read_text())
    script = FILES / os.fspath(job["spec"]["entrypoint"]).split()[-1]
    tree = ast.parse(script.read_text())
    names = {
        a.name
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module == "nanproof.integrations.ray"
        for a in n.names
    }
    from nanproof.integrations import ray

    assert names
    assert all(hasattr(ray, name) for name in names)
