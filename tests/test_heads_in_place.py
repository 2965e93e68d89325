"""A head at a value that the model changes in place before the head takes it."""

import functools

import pytest
import torch
from test_heads import STRENGTH, both, grads, head
from torch import Tensor, nn

import gradsurgery as gs


class InPlace(nn.Module):
    """Changes in place what the head is given, as ``act1`` of a timm resnet does what ``bn1`` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.c = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.a(x)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.parametrize("operator", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_head_takes_the_value_before_what_follows_changes_it_in_place(training, operator):
    model, made, x = InPlace().train(training), head(), torch.randn(6, 3)
    value = model.a(x)
    branch = made(gs.reverse_gradient(value, STRENGTH) if operator else value)
    right = grads(nn.ModuleList([model, made]), both(model.c(value.relu()), branch))
    gs.attach_head(model, "a", made, name="aux", operator=gs.GradientReversal(STRENGTH) if operator else None)
    output, heads = model(x)
    assert torch.equal(heads["aux"], branch)
    with torch.no_grad():
        assert torch.equal(model(x)[1]["aux"], branch)
    for tool in (torch.jit.script, functools.partial(torch.compile, backend="aot_eager", fullgraph=True)):
        assert torch.equal(tool(model)(x)[1]["aux"], branch)
    got = grads(model, both(output, heads["aux"]))
    assert [*map(torch.equal, got.values(), right.values())] == [True] * 8
