"""The pytest plugin: the fixture `finite_guard`.

    def test_training(finite_guard):
        train_one_step(model)

The test fails when any module output or gradient became NaN or Inf in it, and the message names the first.
Torch is imported when the fixture is asked for, and not before.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .watch import FiniteWatch

_REPORTED = pytest.StashKey[bool]()


@pytest.fixture
def finite_guard(request: pytest.FixtureRequest) -> Generator[FiniteWatch]:
    """Fail the test when any module output or gradient becomes NaN or Inf, naming the first."""
    from .watch import FiniteWatch

    with FiniteWatch() as watch:
        yield watch
    # Only where the hook below was not asked: a unittest.TestCase, whose methods pytest does not call itself.
    if watch.first and not request.node.stash.get(_REPORTED, False):
        pytest.fail(_sentence(watch), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Judge right after the test function: a failure here is a failed test, in the teardown it is an error."""
    watch: Any = pyfuncitem.funcargs.get("finite_guard")
    try:
        result = yield
    except Exception as error:
        if watch and watch.first:
            error.add_note(_sentence(watch))
        raise
    finally:
        pyfuncitem.stash[_REPORTED] = True
    if watch and watch.first:
        pytest.fail(_sentence(watch), pytrace=False)
    return result


def _sentence(watch: FiniteWatch) -> str:
    return f"finite_guard: first non-finite value: {watch.first}"
