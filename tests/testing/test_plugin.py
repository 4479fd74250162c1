"""The plugin, in a pytest of its own: what it loads and what it reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from nanproof.testing import FiniteWatch

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

TESTS = """
import unittest
import pytest

def test_forward_breaks(finite_guard):
    import torch
    from torch import nn
    class Log(nn.Module):
        def forward(self, x):
            return x.log()
    nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), Log()))(torch.zeros(2))

def test_backward_breaks(finite_guard):
    import torch
    from torch import nn
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    net[0].weight.data.zero_()
    net[0].bias.data.zero_()
    net(torch.ones(1, 2)).sqrt().sum().backward()

def test_parameter_gradient_breaks(finite_guard):
    import torch
    from torch import nn
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))
        def forward(self, x):
            return x * self.scale.sqrt()
    Root()(torch.ones(1)).sum().backward()

def test_own_failure_keeps_its_message(finite_guard):
    import torch
    assert torch.nn.Softplus()(torch.tensor(torch.inf)).isfinite(), "mine"

@pytest.mark.usefixtures("finite_guard")
class TestOld(unittest.TestCase):
    def test_in_unittest(self):
        import torch
        torch.nn.ReLU()(torch.tensor(torch.inf))

def test_healthy(finite_guard):
    import torch
    net = torch.nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    assert finite_guard.first is None

def test_not_watched():
    import torch
    torch.nn.ReLU()(torch.tensor(torch.inf))
"""


def run_pytest(folder: Path, source: str) -> str:
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "test_it.py"]
    env = {**os.environ, "COLUMNS": "300", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}  # wide enough for a message
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600).stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_pytest(tmp_path_factory.mktemp("watched"), TESTS)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("test_forward_breaks", "output of 1.1 (Log): 2 -Inf of 2 values, first at [0] (float32)"),
        ("test_backward_breaks", "gradient of the output of 1 (ReLU): 2 +Inf of 2 values, first at [0, 0] (float32)"),
        ("test_parameter_gradient_breaks", "gradient of scale of Root: 1 +Inf of 1 values, first at [0] (float32)"),
    ],
)
def test_a_broken_test_fails_with_the_first_place(report: str, test: str, message: str) -> None:
    assert f"FAILED test_it.py::{test} - Failed: finite_guard: first non-finite value: {message}" in report.splitlines()


def test_a_failure_of_the_test_itself_gets_the_place_as_a_note(report: str) -> None:
    assert "AssertionError: mine" in report
    assert "finite_guard: first non-finite value: output of Softplus: 1 +Inf of 1 values" in report


def test_unittest_classes_are_judged_in_the_teardown(report: str) -> None:
    assert "ERROR test_it.py::TestOld::test_in_unittest" in report
    assert "output of ReLU: 1 +Inf of 1 values, first at [] (float32)" in report


def test_the_others_pass(report: str) -> None:
    assert "PASSED test_it.py::test_healthy" in report
    assert "PASSED test_it.py::test_not_watched" in report
    assert report.splitlines()[-1].startswith("4 failed, 3 passed, 1 error")


def test_a_run_without_the_fixture_never_imports_torch(tmp_path: Path) -> None:
    source = "def test_light():\n    import sys\n    import nanproof.testing\n    assert 'torch' not in sys.modules\n"
    assert "1 passed" in run_pytest(tmp_path, source)


def test_the_watch_leaves_no_hook_behind() -> None:
    layer = nn.Linear(1, 1)
    with FiniteWatch() as watch:
        layer(torch.ones(1)).sum().backward()
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks
    assert not layer.weight._post_accumulate_grad_hooks
    layer(torch.tensor([torch.inf]))
    assert watch.first is None


def test_only_the_first_is_kept() -> None:
    with FiniteWatch() as watch:
        nn.ReLU()(torch.tensor(torch.inf))
        nn.Softplus()(torch.tensor(torch.nan))
    assert watch.first == "output of ReLU: 1 +Inf of 1 values, first at [] (float32)"
