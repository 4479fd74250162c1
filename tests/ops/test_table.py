"""The table on the page is what a run gives, and --check notices when it is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ops_table", ROOT / "scripts" / "ops_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ops_table"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0


def test_check_refuses_another_table_and_a_run_repairs_it(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    copy = tmp_path / "ops.md"
    copy.write_text(page.replace("**NaN**", "0"), encoding="utf-8")
    monkeypatch.setattr(script, "PAGE", copy)
    assert script.main(["--check"]) == 1
    assert "docs/ops.md is out of date. Next: python scripts/ops_table.py" in capsys.readouterr().err
    assert script.main([]) == 0
    assert copy.read_text(encoding="utf-8") == page


def test_every_operation_has_a_row(script: ModuleType) -> None:
    assert {row.name for row in script.ROWS} == set(script.ops.__all__) - {"eps_for"}
