"""What no tool can keep is refused with the place and the function in the message."""

import functools
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsurgery as gs

from .nets import Net

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:::gradsurgery")]
X = torch.ones(2, 1)


def reads_sys(x: Tensor) -> Tensor:
    return x * len(list(sys.path))  # TorchScript knows no sys


FUNCTIONS = {
    "reads_sys": reads_sys,
    "<lambda>": lambda x: x * 2,
    "partial": functools.partial(torch.mul, other=2),
    "forward": nn.Tanh().forward,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("graph", [False, True], ids=["module", "GraphModule"])
def test_a_function_that_torchscript_cannot_compile_is_named_with_its_place(name: str, graph: bool) -> None:
    model = torch.fx.symbolic_trace(Net()) if graph else Net()
    gs.insert_transform(model, "plain", FUNCTIONS[name])
    with pytest.raises(gs.OperatorError) as caught:
        torch.jit.script(model)
    assert "at 'plain'" in str(caught.value)
    assert name in str(caught.value)
    with pytest.raises(gs.OperatorError, match="TorchScript cannot compile") as caught:
        torch.jit.script(gs.DetachedTransform(FUNCTIONS[name]))
    assert name in str(caught.value)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_a_function_in_the_language_of_torchscript_is_compiled() -> None:
    model = gs.insert_transform(Net(), "plain", doubled)
    assert torch.equal(torch.jit.script(model)(X), model(X))
    model = gs.insert_transform(Net(), "plain", torch.round)
    assert torch.equal(torch.jit.script(model)(X), model(X))


@pytest.mark.parametrize("strict", [False, True])
def test_exporting_a_function_of_the_gradient_is_refused_at_once(strict: bool) -> None:
    model = gs.insert(Net(), "plain", gs.MapGradient(torch.neg))
    with pytest.raises(Exception, match=r"map_gradient was asked for fn=neg|OperatorError"):
        torch.export.export(model, (X,), strict=strict)


def test_a_pickle_whose_function_cannot_be_imported_says_which(tmp_path: Path) -> None:
    source = types.ModuleType("of_yesterday")
    sys.modules["of_yesterday"] = source
    exec("def halved(x):\n    return x / 2", source.__dict__)
    saved = pickle.dumps(gs.insert_transform(Net(), "plain", source.halved))
    assert torch.equal(pickle.loads(saved)(X), torch.full((2, 1), 8.0))
    del source.halved
    with pytest.raises(AttributeError, match="halved.*of_yesterday"):
        pickle.loads(saved)
    del sys.modules["of_yesterday"]
    with pytest.raises(ModuleNotFoundError, match="of_yesterday"):
        pickle.loads(saved)


def test_a_function_that_pickle_cannot_name_is_refused_when_it_is_saved() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(gs.insert_transform(Net(), "plain", lambda x: x * 2))
