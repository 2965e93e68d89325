"""A function of the gradient in what is recorded and saved: kept by its name, or refused."""

import functools
import io
import subprocess
import sys
import textwrap
import types

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import gradsurgery as gs
from gradsurgery.operators import kept

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated"),
    pytest.mark.filterwarnings("ignore:The TorchScript type system"),  # of the GraphModule that fx builds
]
X = torch.tensor([[1.0, -2.0], [0.5, 4.0]])


def cubed(g):
    return g * g * g


def flattened(g):
    return g.flatten()


def net(fn=cubed):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), gs.MapGradient(fn), nn.Linear(2, 1))


def grads(model):
    model.zero_grad()
    model(X).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def saved_script(module):
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def saved_program(program):
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


RECORDED = {
    "fx": torch.fx.symbolic_trace,
    "fx twice": lambda m: torch.fx.symbolic_trace(torch.fx.symbolic_trace(m)),
    "fx, scripted": lambda m: torch.jit.script(torch.fx.symbolic_trace(m)),
    "script": torch.jit.script,
    "script, saved": lambda m: saved_script(torch.jit.script(m)),
    "trace": lambda m: torch.jit.trace(m, X),
    "trace, saved": lambda m: saved_script(torch.jit.trace(m, X)),
    "export": lambda m: torch.export.export(m, (X,)).module(),
    "export, strict": lambda m: torch.export.export(m, (X,), strict=True).module(),
    "export, saved": lambda m: saved_program(torch.export.export(m, (X,))),
    "export, decomposed": lambda m: torch.export.export(m, (X,)).run_decompositions().module(),
    "export, compiled": lambda m: torch.compile(torch.export.export(m, (X,)).module(), backend="aot_eager"),
}


@pytest.mark.parametrize("how", RECORDED)
def test_a_function_with_a_name_is_kept(how):
    model = net()
    right = grads(model)
    assert not torch.equal(right["0.weight"], grads(nn.Sequential(model[0], model[1], model[3]))["0.weight"])
    recorded = RECORDED[how](net())
    for _ in range(3):  # until TorchScript has its optimised plan
        found = grads(recorded)
        assert list(found.values()) and all(
            torch.equal(a, b) for a, b in zip(found.values(), right.values(), strict=True)
        )


def test_its_second_derivative_is_that_of_eager():
    def twice(model):
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), list(model.parameters()), allow_unused=True)

    right, found = twice(net()), twice(torch.export.export(net(), (X,)).module())
    assert any(g is not None and g.abs().sum() > 0 for g in right[:2])
    for a, b in zip(right, found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_make_fx_keeps_it():
    def f(x):
        return gs.map_gradient(x.sin(), cubed).square().sum()

    recorded = make_fx(f)(X)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    f(x).backward()
    recorded(y).backward()
    assert torch.equal(x.grad, y.grad)


class Bound:
    def method(self, g):
        return g * 2


def closure():
    def local(g):
        return g * 2

    return local


UNNAMED = {
    "lambda": lambda g: g * 2,
    "closure": closure(),
    "partial": functools.partial(torch.mul, other=2),
    "method": Bound().method,
    "function of a class": Bound.method,
    "module": nn.Tanh(),
    "builtin": torch.neg,
}


@pytest.mark.parametrize("kind", UNNAMED)
@pytest.mark.parametrize("how", ["script", "trace", "export"])
def test_a_function_without_a_name_is_refused(kind, how):
    with pytest.raises(gs.OperatorError, match="at the top of a module that can be imported"):
        RECORDED[how](net(UNNAMED[kind]))


def test_a_function_whose_name_means_another_by_now_is_refused(monkeypatch):
    model = net()
    monkeypatch.setattr(sys.modules[__name__], "cubed", lambda g: g)
    with pytest.raises(gs.OperatorError, match="cubed"):
        torch.export.export(model, (X,))


@pytest.mark.parametrize("how", ["script", "trace", "export"])
def test_a_graph_whose_function_was_replaced_since_is_refused(how, monkeypatch):
    def module(source):
        made = types.ModuleType("reloaded")
        exec(source, made.__dict__)
        monkeypatch.setitem(sys.modules, "reloaded", made)
        return made

    monkeypatch.setattr(kept, "_FUNCTIONS", {})
    monkeypatch.setattr(kept, "_AMBIGUOUS", set())
    recorded = RECORDED[how](net(module("def f(g): return g * 2").f))
    right = list(grads(recorded).values())
    gs.MapGradient(module("def f(g): return g * 2").f)  # a reload of the same code
    assert all(map(torch.equal, grads(recorded).values(), right))
    changed = net(module("def f(g): return g * 100").f)
    with pytest.raises(Exception, match="two functions of that name"):
        grads(recorded)
    assert grads(changed)  # eager holds the function itself


def test_what_a_decorator_wraps_is_part_of_the_function(monkeypatch):
    monkeypatch.setattr(kept, "_FUNCTIONS", {})
    monkeypatch.setattr(kept, "_AMBIGUOUS", set())
    source = (
        "def wrap(fn):\n    def f(g): return fn(g)\n    f.__qualname__ = 'f'\n    return f\nf = wrap(lambda g: g * {})"
    )
    for factor in (2, 100):
        made = types.ModuleType("reloaded")
        exec(source.format(factor), made.__dict__)
        monkeypatch.setitem(sys.modules, "reloaded", made)
        gs.MapGradient(made.f)
    with pytest.raises(gs.OperatorError, match="two functions of that name"):
        kept.known("reloaded:f")


@pytest.mark.parametrize("how", ["fx", "script", "trace", "export"])
def test_tangents_are_refused(how):
    recorded = RECORDED[how](net())
    for parameter in recorded.parameters():
        parameter.requires_grad_(False)  # nothing but the tangents asks for a derivative
    with pytest.raises(Exception, match="forward AD"):
        torch.func.jvp(recorded, (X,), (X,))
    with forward_ad.dual_level(), pytest.raises(Exception, match="forward AD"):
        recorded(forward_ad.make_dual(X, X))


@pytest.mark.parametrize("how", ["script", "trace", "export"])
def test_another_shape_is_refused_in_backward(how):
    recorded = RECORDED[how](net(flattened))
    with pytest.raises(Exception, match="map_gradient asks of fn a tensor of the shape"):
        grads(recorded)


@pytest.mark.parametrize("file", ["script", "program"])
def test_in_another_process_a_file_asks_for_its_function_and_trains_with_it(file, tmp_path):
    (tmp_path / "clips.py").write_text("def doubled(g):\n    return g * 2\n")
    script = textwrap.dedent("""
        import sys, torch, warnings
        warnings.simplefilter("ignore")
        import gradsurgery as gs
        torch.manual_seed(0)
        plain = torch.nn.Linear(2, 1)
        x = torch.ones(1, 2)

        def build():
            import clips
            model = torch.nn.Sequential(plain, gs.MapGradient(clips.doubled))
            if sys.argv[2] == "script":
                torch.jit.script(model).save(sys.argv[3])
            else:
                torch.export.save(torch.export.export(model, (x,)), sys.argv[3])

        def load():
            return torch.jit.load(sys.argv[3]) if sys.argv[2] == "script" else torch.export.load(sys.argv[3]).module()

        if sys.argv[1] == "build":
            build()
        else:
            model = load()
            try:
                model(x)
            except Exception as error:
                assert "Import clips and construct gradsurgery.MapGradient(clips.doubled)" in str(error), error
            else:
                raise SystemExit("an unknown function went unnoticed")
            assert "clips" not in sys.modules  # a file runs no code of its own
            import clips
            gs.MapGradient(clips.doubled)
            model(x).sum().backward()
            plain(x).sum().backward()
            (weight, bias), (w, b) = model.parameters(), plain.parameters()
            assert torch.equal(weight.grad, 2 * w.grad) and torch.equal(bias.grad, 2 * b.grad)
    """)
    (tmp_path / "it.py").write_text(script)
    for job in ("build", "load"):
        command = [sys.executable, "it.py", job, file, str(tmp_path / ("m.pt" if file == "script" else "m.pt2"))]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
