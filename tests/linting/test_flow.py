"""Which expression a name holds, and what names stand for: the questions that rules ask."""

from __future__ import annotations

import ast

import pytest

from nanproof.linting.source import Module


def held(source: str, name: str = "x") -> str | None:
    """What the module says that ``name`` holds in the call of ``use(name)``."""
    module = Module.parse(source)
    node = module.calls("use")[0].args[0]
    assert ast.unparse(node) == name
    value = module.value(node)
    return None if value is None else module.source(value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\nuse(x)", "1"),
        ("x = 1\nx = 2\nuse(x)", "2"),
        ("x = 1\nuse(x)\nx = 2", "1"),
        ("x: int = 3\nuse(x)", "3"),
        ("x, y = a, b\nuse(x)", "a"),
        ("x, y = pair()\nuse(x)", None),
        ("x, *y = 1, 2, 3\nuse(x)", None),
        ("x = 1\nx += 1\nuse(x)", "x += 1"),
        ("if (x := f()):\n    use(x)", "f()"),
        ("x = 1\nif c:\n    x = 2\nuse(x)", None),
        ("x = 1\nif c:\n    x = 2\n    use(x)", "2"),
        ("x = 1\nif c:\n    x = 2\nelse:\n    use(x)", "1"),
        ("x = 1\nif c:\n    x = 2\n    raise E\nuse(x)", "1"),
        ("if c:\n    x = 2\nuse(x)", None),
        ("x = 1\ntry:\n    x = 2\nexcept E:\n    pass\nuse(x)", None),
        ("with a:\n    x = 2\nuse(x)", "2"),
        ("with a as x:\n    use(x)", None),
        ("x = 1\nfor i in r:\n    use(x)", "1"),
        ("x = 1\nfor i in r:\n    use(x)\n    x = 2", None),
        ("x = 1\nfor i in r:\n    x = 2\n    use(x)", "2"),
        ("x = 1\nfor x in r:\n    use(x)", None),
        ("x = 1\nfor x in r:\n    pass\nuse(x)", None),
        ("x = 1\nwhile c:\n    if d:\n        x = 3\n    use(x)", None),
        ("x = f(x)\ny = [use(x) for x in xs]", None),
        ("x = 1\ny = [use(x) for i in xs]", "1"),
        ("x = 1\nx = g(use(x))", "1"),
        ("x = 1\ndel x\nuse(x)", None),
        ("EPS = 1e-8\ndef f():\n    use(EPS)", "1e-8"),
        ("EPS = 1e-8\nEPS = 1e-6\ndef f():\n    use(EPS)", None),
        ("x = 1\ndef f(x):\n    use(x)", None),
        ("x = 1\ndef f(*x):\n    use(x)", None),
        ("def f(x):\n    x = x.float()\n    use(x)", "x.float()"),
        ("def f(x):\n    if x is None:\n        x = 0\n    use(x)", None),
        ("def f():\n    x = 1\n    def g():\n        use(x)", "1"),
        ("x = 1\ng = lambda x: use(x)", None),
        ("class A:\n    x = 5\ndef f():\n    use(x)", None),
    ],
)
def test_the_value_of_a_name(source: str, expected: str | None) -> None:
    name = "EPS" if "EPS" in source else "x"
    assert held(source, name) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def __init__(self):\n        self.x = 1\n    def f(self):\n        use(self.x)", "1"),
        (
            "def __init__(self):\n        self.x = 1\n    def g(self):\n        self.x = 2\n    "
            "def f(self):\n        use(self.x)",
            None,
        ),
        ("def f(self):\n        self.x = 1\n        use(self.x)\n    def g(self):\n        self.x = 2", "1"),
    ],
)
def test_the_value_of_an_attribute(body: str, expected: str | None) -> None:
    assert held(f"class A:\n    {body}", "self.x") == expected


def test_all_values() -> None:
    module = Module.parse("def f(c):\n    x = 1\n    if c:\n        x = 2\n    use(x)")
    assert [module.source(v) for v in module.values(module.calls("use")[0].args[0])] == ["1", "2"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch.log(x)", "torch.log"),
        ("import torch as th\nth.log(x)", "torch.log"),
        ("from torch import log\nlog(x)", "torch.log"),
        ("from torch import log as ln\nln(x)", "torch.log"),
        ("import torch.nn.functional as F\nF.softmax(x)", "torch.nn.functional.softmax"),
        ("from torch.nn import functional as F\nF.softmax(x)", "torch.nn.functional.softmax"),
        ("from torch import nn\nnn.functional.softmax(x)", "torch.nn.functional.softmax"),
        ("from torch import nn\nF = nn.functional\nF.softmax(x)", "torch.nn.functional.softmax"),
        ("import torch\nsoftmax = torch.softmax\nsoftmax(x)", "torch.softmax"),
        ("from torch import *\nlog(x)", "torch.log"),
        ("from torch import *\ndef log(x): pass\nlog(x)", ""),
        ("import torch\ndef f(torch):\n    torch.log(x)", ""),
        ("import torch\ndef f():\n    torch = g()\n    torch.log(x)", ""),
        ("import math\nmath.log(x)", "math.log"),
        ("float(x)", "float"),
        ("def float(x): pass\nfloat(x)", ""),
        ("from .losses import dice\ndice(x)", ".losses.dice"),
        ("from . import losses\nlosses.dice(x)", ".losses.dice"),
        ("self.log(x)", ""),
        ("f()(x)", ""),
    ],
)
def test_what_is_called(source: str, expected: str) -> None:
    module = Module.parse(source)
    assert module.called(module.nodes(ast.Call)[0]) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch.log(x)", ("log", "x", [], [])),
        ("x.log()", ("log", "x", [], [])),
        ("F.softmax(x, dim=1)", ("softmax", "x", [], ["dim"])),
        ("x.softmax(1)", ("softmax", "x", ["1"], [])),
        ("torch.softmax(input=x, dim=1)", ("softmax", "x", [], ["dim"])),
        ("torch.rand(3).log()", ("log", "torch.rand(3)", [], [])),
        ("torch.linalg.norm(x)", ("norm", "x", [], [])),
        ("self.p.clamp(min=0)", ("clamp", "self.p", [], ["min"])),
        ("x.sigmoid_()", ("sigmoid_", "x", [], [])),
        ("nn.Softmax(dim=1)", None),
        ("math.log(x)", None),
        ("np.log(x)", None),
        ("np.exp(x).sum()", None),
        ("array.sum()", None),
        ("logging.log(1, x)", None),
        ("logger.log(x)", None),
        ("self.log('loss', x)", None),
        ("self.logger.log(x)", None),
        ("wandb.log(x)", None),
        ("[1].sort()", None),
        ("super().log()", None),
        ("dist.all_reduce(x)", None),
    ],
)
def test_one_view_on_functions_and_methods(line: str, expected: tuple[str, str, list[str], list[str]] | None) -> None:
    module = Module.parse(
        "import logging, math, torch, wandb\n"
        "import numpy as np\nimport torch.nn.functional as F\nfrom torch import nn\n"
        f"import torch.distributed as dist\narray = np.zeros(3)\n{line}"
    )
    found = module.operation(module.nodes(ast.Expr)[0].value)
    if found is None or expected is None:
        assert found == expected
    else:
        name, first, rest, keywords = found
        assert (name, ast.unparse(first), [ast.unparse(r) for r in rest], list(keywords)) == expected


def test_gradients_off() -> None:
    module = Module.parse(
        "import torch\nfrom torch import no_grad\n"
        "with torch.no_grad():\n    use(1)\n@torch.inference_mode()\ndef f():\n    use(1)\n"
        "with no_grad(), a:\n    use(1)\nwith torch.set_grad_enabled(False):\n    use(1)\n"
        "with torch.set_grad_enabled(train):\n    use(0)\nuse(0)"
    )
    for call in module.calls("use"):
        assert module.under_no_grad(call) == bool(ast.literal_eval(call.args[0]))


def test_columns_count_bytes_but_texts_count_characters() -> None:
    module = Module.parse("é = 1; größe = use(é)\r\nif é:\r\n\tü = '\f'; x = log(ü)")
    assert [module.source(c) for c in module.nodes(ast.Call)] == ["use(é)", "log(ü)"]
    assert module.place(module.span(module.nodes(ast.Call)[1])[0]) == (3, 15)


def test_uses_in_a_scope() -> None:
    module = Module.parse("def f(p):\n    q = p + p\n    g = lambda: p\ndef h(p):\n    return p")
    assert len(module.uses("p", module.tree.body[0])) == 3
    assert len(module.uses("p")) == 4


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("train.py", False),
        ("test_train.py", True),
        ("pkg/train_test.py", True),
        ("conftest.py", True),
        ("tests/unit/data.py", True),
        ("latest/train.py", False),
        ("/somewhere/tests/project/train.py", False),
        ("/somewhere/project/tests/data.py", True),
    ],
)
def test_what_is_a_test(path: str, expected: bool) -> None:
    assert Module.parse("", path).is_test is expected
