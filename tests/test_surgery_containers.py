"""An operator with state is a child of its module, and no layer of it."""

import pytest
import torch
from core_helpers import assert_untouched, chain, seeded, snapshot, step
from torch import Tensor, nn

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))

CONTAINERS = {
    "Sequential": lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
    "OwnSequential": lambda: OwnSequential(nn.Linear(3, 3), nn.Tanh()),
    "ByChildren": lambda: ByChildren(nn.Linear(3, 3), nn.Tanh()),
    "ByNamedChildren": lambda: ByNamedChildren(nn.Linear(3, 3), nn.Tanh()),
    "OwnList": lambda: OwnList([nn.Linear(3, 3), nn.Tanh()]),
    "OwnDict": lambda: OwnDict({"a": nn.Linear(3, 3), "b": nn.Tanh()}),
    "OwnDictByKey": lambda: OwnDictByKey({"a": nn.Linear(3, 3), "b": nn.Tanh()}),
    "ByModules": lambda: ByModules(nn.Linear(3, 3), nn.Tanh()),
}


class OwnSequential(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        assert len(self) == 2
        for layer in self:
            x = layer(x)
        return x


class ByChildren(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class ByNamedChildren(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for _, layer in self.named_children():
            x = layer(x)
        return x


class ByModules(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self._modules.values():
            x = layer(x)
        return x


class OwnList(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for k in range(len(self)):
            x = self[k](x)
        return self[-1](x)


class OwnDict(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        for (_, layer), same in zip(self.items(), self.values(), strict=True):
            assert layer is same
            x = layer(x)
        return x


class OwnDictByKey(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        assert len(self) == 2
        for key in self:
            x = self[key](x)
        for key in self.keys():
            x = self[key](x)
        return x


@pytest.mark.parametrize("name", CONTAINERS)
def test_an_operator_is_no_layer_of_its_container(name: str) -> None:
    """What a forward that walks its own children meets are the user's layers alone."""
    plain, model = chain(seeded(CONTAINERS[name])), chain(seeded(CONTAINERS[name]))
    y0, g0 = step(plain, X)
    before = snapshot(model)
    if name == "ByModules":  # what reads _modules itself cannot be kept from it
        with pytest.raises(gs.SurgeryError, match="_modules"):
            gs.insert_transform(model, "1", lambda v: v + 1)
        assert_untouched(before, model)
        return
    gs.insert_transform(model, "1", lambda v: v + 1)
    hooked = chain(seeded(CONTAINERS[name]))
    hooked[1].register_forward_hook(lambda module, args, y: gs.straight_through(y, lambda v: v + 1))
    y, g = step(model, X)
    y1, g1 = step(hooked, X)
    assert torch.equal(y[0], y1[0])
    assert not torch.equal(y[0], y0[0])
    assert all(torch.equal(g[n], g1[n]) for n in g0)
    assert len(model[1]) == 2
    assert [type(layer).__name__ for layer in model[1].children()] == ["Linear", "Tanh"]
    with gs.disabled(model):
        y, g = step(model, X)
        assert torch.equal(y[0], y0[0])
        assert all(torch.equal(g[n], g0[n]) for n in g0)
    y, _ = step(model, X)
    assert torch.equal(y[0], y1[0])
    gs.remove(model)
    assert_untouched(before, model)


def test_a_container_is_indexed_and_sliced_as_before() -> None:
    model = OwnSequential(nn.Linear(3, 3), nn.Tanh())
    last = model[1]
    gs.insert_transform(model, "", torch.round)
    assert model[-1] is last
    assert list(model) == [model[0], last]
    assert type(model[:1]) is OwnSequential
    assert list(model[-1:]) == [last]
