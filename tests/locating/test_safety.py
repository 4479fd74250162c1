"""Locating can never end a run: whatever tensors a step is made of, an answer comes back, or a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from support.forked import run_python

pytestmark = pytest.mark.slow

HEAD = """
import warnings; warnings.simplefilter("ignore")
import torch, nanproof
from torch import nn
from torch.autograd import forward_ad
torch.manual_seed(0); torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(4, 2)
"""
# each leaves a function `step`; its bad line bears "# BAD"
STEPS = {
    "jvp": """
def step():
    u, du = torch.func.jvp(net, (x,), (torch.ones_like(x),))
    return torch.log(du * 0).mean()  # BAD
""",
    "jacfwd": """
def step():
    j = torch.func.vmap(torch.func.jacfwd(net))(x)
    return (torch.sqrt(-j.pow(2) - 1)).mean()  # BAD
""",
    "hessian": """
def step():
    h = torch.func.hessian(lambda v: net(v).sum())(x[0])
    return (1 / (h - h)).mean()  # BAD
""",
    "forward_ad": """
def step():
    with forward_ad.dual_level():
        out = net(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(out).tangent
    return torch.log(tangent * 0).mean()  # BAD
""",
    "inside jvp": """
def step():
    f = lambda v: torch.log(net(v) * 0)  # BAD
    u, du = torch.func.jvp(f, (x,), (torch.ones_like(x),))
    return u.mean()
""",
    "per-sample gradients": """
params = {k: v.detach() for k, v in net.named_parameters()}
def loss_of(p, xi):
    return torch.sqrt(torch.func.functional_call(net, p, (xi,)).sum() * 0)  # BAD
def step():
    g = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(params, x)
    return sum(v.sum() for v in g.values()) + net(x).sum()
""",
    "sparse embedding": """
net = nn.Embedding(6, 4, sparse=True)
def step():
    return (net(torch.tensor([1, 2])) * 0).log().mean()  # BAD
""",
    "sparse gradient": """
net = nn.Embedding(6, 4, sparse=True)
def step():
    e = net(torch.tensor([1, 2]))
    return (e - e.detach()).pow(2).sum().sqrt()  # BAD
""",
    "sparse matrix": """
a = torch.eye(4).to_sparse_csr()
def step():
    h = a @ net(x)
    return torch.log(h * 0).mean()  # BAD
""",
    "jagged": """
def step():
    nt = torch.nested.nested_tensor([x[:1], x], layout=torch.jagged)
    return torch.log(net(nt) * 0).values().mean()  # BAD
""",
    "complex": """
def step():
    z = torch.fft.rfft(net(x).squeeze(-1))
    return torch.log(z * 0).abs().mean()  # BAD
""",
    "float8": """
def step():
    h = net(x).mul(1e9).to(torch.float8_e5m2)  # BAD
    return h.float().mean()
""",
    "quantized": """
def step():
    q = torch.quantize_per_tensor(net(x).detach(), 0.1, 0, torch.qint8)
    return (net(x) * q.dequantize() * 0).log().mean()  # BAD
""",
    "subclass": """
class Mine(torch.Tensor):
    pass
def step():
    return torch.log(net(x.as_subclass(Mine)) * 0).mean().as_subclass(torch.Tensor)  # BAD
""",
    "wrapper subclass": """
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map
class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
    def __init__(self, inner):
        self.inner = inner
    def __tensor_flatten__(self):
        return ["inner"], None
    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Wrapped(inner["inner"])
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map(lambda v: v.inner if isinstance(v, Wrapped) else v, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return tree_map(lambda v: Wrapped(v) if isinstance(v, torch.Tensor) else v, out)
def step():
    w = Wrapped(x)
    bad = torch.log(w * 0)  # BAD
    return net(x).mean() + bad.inner.mean()
""",
    "meta beside it": """
shape = nn.Linear(3, 3, device="meta")
def step():
    shape(torch.ones(2, 3, device="meta"))
    return torch.log(net(x) * 0).mean()  # BAD
""",
    "fake beside it": """
from torch._subclasses.fake_tensor import FakeTensorMode
def step():
    with FakeTensorMode():
        torch.ones(3) + 1
    return torch.log(net(x) * 0).mean()  # BAD
""",
    "custom op": """
@torch.library.custom_op("mine::broken", mutates_args=())
def broken(v: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(v.detach().numpy() / 0)
broken.register_autograd(lambda ctx, g: g)
def step():
    return broken(net(x)).mean()  # BAD
""",
    "zero tensor": """
def step():
    z = torch._efficientzerotensor((4, 1))
    return torch.log(net(x) * 0 + z).mean()  # BAD
""",
    "inference tensors": """
with torch.inference_mode():
    frozen = torch.zeros(4, 1)
def step():
    return (net(x) / frozen.clone()).mean()  # BAD
""",
    "jit": """
@torch.jit.script
def scripted(v):
    y = v * 0
    return torch.log(y)
def step():
    return scripted(net(x)).mean()  # BAD
""",
    "saved tensor hooks": """
def step():
    with torch.autograd.graph.save_on_cpu():
        h = net(x)
        return (h - h.detach()).abs().sqrt().sum()  # BAD
""",
    "branch": """
def step():
    h = net(x)
    return torch.cond(h.sum() > -1e9, lambda v: torch.log(v * 0), torch.sin, (h,)).mean()  # BAD
""",
    "loop": """
from torch._higher_order_ops.while_loop import while_loop
def step():
    h = net(x)
    _, grown = while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (torch.tensor(0), h.detach()))
    return torch.log(h * 0 + grown * 0).mean()  # BAD
""",
    "transforms within each other": """
def step():
    j = torch.func.jacrev(torch.func.jacfwd(lambda v: net(v).pow(2).sum()))(x[0])
    return (1 / (j * 0)).mean() + net(x).mean()  # BAD
""",
    "masked tensor": """
from torch.masked import masked_tensor
def step():
    h = net(x)
    kept = masked_tensor(h.detach(), h.detach() > -9).sum().get_data()
    return torch.log(kept * 0 + h.sum() * 0)  # BAD
""",
    "checkpoint": """
from torch.utils.checkpoint import checkpoint
def block(v):
    h = net(v)
    return (h - h.detach()).abs().sqrt()  # BAD
def step():
    return checkpoint(block, x, use_reentrant=False).sum() + net(x).sum()
""",
    "anomaly mode": """
def step():
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return torch.log(net(x) * 0).mean()  # BAD
""",
    "expanded and empty": """
def step():
    e = torch.zeros(0, 2)
    h = net(e).mean()  # BAD
    return h + net(x[:1].expand(3, 2)).mean()
""",
    "several threads": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
def step():
    parts = list(pool.map(lambda v: float(v.sum()), x))
    return torch.log(net(x) * 0).mean() + sum(parts)  # BAD
""",
}


if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):  # torch 2.7 refuses them under any mode
    del STEPS["branch"], STEPS["loop"]


@pytest.mark.parametrize("group", range(3))
def test_no_step_ends_the_process(tmp_path: Path, group: int) -> None:
    """In a process of its own: a crash would take the test run with it."""
    names = sorted(STEPS)[group::3]
    driver = ["import faulthandler; faulthandler.enable()"]
    for i, name in enumerate(names):
        (tmp_path / f"step{i}.py").write_text(HEAD + STEPS[name])
        driver.append(
            f"import step{i} as s; found = s.nanproof.locate(s.step, model=s.net, batch=s.x)\n"
            f"print({name!r}, '|', found.reproduced, '|', found.line, '|', found.verified, flush=True)"
        )
    (tmp_path / "driver.py").write_text("\n".join(driver))
    done = run_python("driver.py", cwd=tmp_path, apart=True)
    said = {line.split(" | ")[0]: line.split(" | ")[1:3] for line in done.stdout.splitlines()}
    assert done.returncode == 0, f"{list(said)[-1:]}: {done.stderr[-2000:]}"
    for i, name in enumerate(names):
        lines = (tmp_path / f"step{i}.py").read_text().splitlines()
        right = {str(n) for n, text in enumerate(lines, 1) if "# BAD" in text}
        assert said[name][0] == "True", name
        assert said[name][1] in right, f"{name}: line {said[name][1]}, not {right}"
