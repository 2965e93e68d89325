"""Recipes: what was inserted as JSON, the same again on another instance, and nothing at all from a wrong one."""

import copy
import json
import sys
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import gradsurgery as gs

PLACES: list[tuple[Any, nn.Module, dict[str, Any]]] = [
    ("layer3", gs.GradientReversal(0.5), {}),
    ("layer3", gs.ScaleGradient(-0.25), {}),
    ("layer2", gs.StopGradient(), {"side": "input"}),
    ("layer4.0:add", gs.GradientReversal(2.0), {}),
    ("layer3 -> layer4", gs.ScaleGradient(0.125), {}),
    ("", gs.ScaleGradient(0.5), {}),
    (["layer1.0", "layer1.1"], gs.ScaleGradient(0.5), {}),
    ("layer1.*:add", gs.ScaleGradient(2.0), {}),
]


class Block(nn.Module):
    """A tuple, an op called twice, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.two(self.one(x))
        h = torch.tanh(h)
        return torch.tanh(h + x)


def clip(g: Tensor) -> Tensor:
    return g.clamp(-1, 1)


class Holder:
    @staticmethod
    def halve(x: Tensor) -> Tensor:
        return x / 2


def gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(*inputs).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        there = other[name]
        assert (gradient is None) == (there is None), name
        assert gradient is None or torch.equal(gradient, there), name


def again(recipe: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(recipe, allow_nan=False))


@pytest.mark.parametrize("count", range(1, len(PLACES) - 1))
def test_another_instance_gets_the_same_gradients_and_the_same_recipe(count: int) -> None:
    model = timm.create_model("resnet18").eval()
    twin, plain = copy.deepcopy(model), copy.deepcopy(model)
    for at, operator, options in PLACES[:count]:
        gs.insert(model, at, copy.deepcopy(operator), **options)
    recipe = gs.recipe(model)
    assert gs.apply(twin, again(recipe)) is twin
    x = torch.randn(2, 3, 32, 32)
    found = gradients(model, x)
    assert_same(found, gradients(twin, x))
    assert any(not torch.equal(g, found[n]) for n, g in gradients(plain, x).items() if found[n] is not None)
    assert gs.recipe(twin) == recipe
    assert [str(row) for row in gs.operations(gs.apply(plain, recipe))] == [
        str(row) for row in gs.operations(gs.apply(timm.create_model("resnet18"), recipe))
    ]


def test_elements_sides_and_calls_are_addressed_again() -> None:
    block = gs.insert_grl(Block(), "two[0]", 0.5)
    gs.insert_stop_gradient(block, "two[1][0]")
    gs.insert_scale_gradient(block, ":tanh@1", 0.5)
    gs.insert_scale_gradient(block, ":tanh@*", 2.0)
    gs.insert_scale_gradient(block, "two", 4.0, side="input")
    other = Block()
    other.load_state_dict(block.state_dict())
    gs.apply(other, again(gs.recipe(block)))
    x = torch.randn(3, 2, 4)
    assert_same(gradients(block, x), gradients(other, x))


def test_an_operator_that_serves_several_places_still_does() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    recipe = gs.recipe(gs.insert(net, ["0", "2"], gs.GradientReversal(0.5)))
    assert recipe["operations"][1] == {"at": "2", "side": "output", "same_operator_as": 0}
    rows = gs.operations(gs.apply(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), recipe))
    assert rows[0].operator is rows[1].operator
    own = gs.recipe(gs.insert_grl(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), ["0", "2"], 0.5))
    assert all("same_operator_as" not in step for step in own["operations"])


def test_a_shared_module_is_one_operation() -> None:
    linear = nn.Linear(2, 2)
    net = gs.insert_grl(nn.Sequential(linear, nn.ReLU(), linear), "0")
    assert len(gs.operations(net)) == 2
    assert [step["at"] for step in gs.recipe(net)["operations"]] == ["0"]


def test_a_graph_module_has_one_too() -> None:
    def traced() -> torch.fx.GraphModule:
        torch.manual_seed(0)
        return torch.fx.symbolic_trace(timm.create_model("resnet18").eval())

    module = gs.insert_grl(traced(), "layer3", 0.5)
    gs.insert_scale_gradient(module, "layer4.0:add", 0.25)
    other = gs.apply(traced(), again(gs.recipe(module)))
    x = torch.randn(2, 3, 32, 32)
    for one, two in zip(gradients(module, x).values(), gradients(other, x).values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (torch.round, "torch:round"),
        (torch.nn.functional.gelu, "torch.nn.functional:gelu"),
        (clip, f"{__name__}:clip"),
        (Holder.halve, f"{__name__}:Holder.halve"),
    ],
)
@pytest.mark.parametrize("kind", [gs.StraightThrough, gs.FrozenTransform, gs.DetachedTransform, gs.MapGradient])
def test_a_function_is_a_name_and_has_to_be_given(kind: type[nn.Module], fn: Any, name: str) -> None:
    recipe = gs.recipe(gs.insert(nn.Sequential(nn.Linear(2, 2)), "0", kind(fn)))
    assert recipe["operations"] == [{"at": "0", "side": "output", "operator": kind.__name__, "fn": name}]
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(gs.OperatorError, match=f"operation 0 .*{name}.* functions="):
        gs.apply(net, again(recipe))
    assert not gs.operations(net)
    gs.apply(net, again(recipe), functions={name: fn})
    assert type(gs.operations(net)[0].operator) is kind
    assert gs.operations(net)[0].operator.fn is fn


def test_applying_imports_nothing() -> None:
    """A stranger's recipe names a module whose import would run its code."""
    recipe = {"format": 1, "operations": [{"at": "0", "operator": "MapGradient", "fn": "antigravity:geohash"}]}
    sys.modules.pop("antigravity", None)
    with pytest.raises(gs.OperatorError, match="Nothing is imported"):
        gs.apply(nn.Sequential(nn.Linear(1, 1)), recipe)
    assert "antigravity" not in sys.modules


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Louder(gs.ScaleGradient):
    pass


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        (gs.MapGradient(lambda g: -g), "fn=<lambda>, which is no function that a module holds"),
        (gs.StraightThrough(nn.Hardtanh()), "a module, whose weights are no data"),
        (gs.StraightThrough(torch.ones(1).add), "fn=add, which is no function"),
        (Own(), "Own.., a class of your own"),
        (Louder(1), "Louder.scale=1.0., a class of your own"),
    ],
)
def test_what_is_no_data_is_refused_by_name(operator: nn.Module, said: str) -> None:
    net = gs.insert(nn.Sequential(nn.Linear(2, 2)), "0", operator)
    with pytest.raises(gs.OperatorError, match=f"at '0' .*{said}"):
        gs.recipe(net)


def test_a_head_is_refused_by_name_and_can_be_taken_off() -> None:
    net = gs.insert_grl(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "1", 0.5)
    gs.attach_head(net, "0", nn.Linear(2, 1), operator=gs.GradientReversal(), name="domain")
    with pytest.raises(gs.SurgeryError, match="the head 'domain' at '0'"):
        gs.recipe(net)
    gs.remove(net, "0")
    assert len(gs.recipe(net)["operations"]) == 1


def test_nothing_and_what_is_lost_are_refused() -> None:
    with pytest.raises(gs.AddressError, match="nothing was inserted"):
        gs.recipe(nn.Linear(1, 1))
    net = gs.insert_grl(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "1")
    with pytest.raises(gs.VerificationError, match="at '1' was inserted and is lost"):
        gs.recipe(nn.SyncBatchNorm.convert_sync_batchnorm(net))


GOOD = {"at": "0", "side": "output", "operator": "GradientReversal", "lambd": 0.5}


@pytest.mark.parametrize(
    ("error", "said", "change"),
    [
        (gs.OperatorError, "operation 1 .*operator='Reverse'. The operators are", {"operator": "Reverse"}),
        (gs.OperatorError, "operation 1 .*operator=None", {"operator": None}),
        (gs.OperatorError, "operation 1 .*operator=", {"operator": ["GradientReversal"]}),
        (gs.OperatorError, "operation 1 .*negative", {"lambd": -1.0}),
        (gs.OperatorError, "operation 1 .*not finite", {"lambd": float("inf")}),
        (gs.OperatorError, "operation 1 .*lambd='1'", {"lambd": "1"}),
        (gs.OperatorError, "operation 1 .*lambd=True", {"lambd": True}),
        (gs.AddressError, "no module '7'", {"at": "7"}),
        (gs.AddressError, "exactly 1 place; it names 2", {"at": "*"}),
        (gs.AddressError, "is no address", {"at": "0:"}),
        (gs.SurgeryError, "operation 1 .*at=0", {"at": 0}),
        (gs.SurgeryError, "operation 1 .*side='top'", {"side": "top"}),
        (gs.SurgeryError, "operation 1 .*'sides', which means nothing", {"sides": "input"}),
        (gs.SurgeryError, "operation 1 .*'scale', which means nothing", {"scale": 2.0}),
        (gs.SurgeryError, "operation 1 .*same_operator_as=1", {"same_operator_as": 1}),
        (gs.SurgeryError, "operation 1 .*same_operator_as=True", {"same_operator_as": True}),
        (gs.SurgeryError, "operation 1 .*same_operator_as=-1", {"same_operator_as": -1}),
        (gs.SurgeryError, "operation 1 .*'operator', 'lambd', which means nothing", {"same_operator_as": 0}),
    ],
)
def test_a_wrong_operation_leaves_the_model_as_it_was(
    error: type[Exception], said: str, change: dict[str, Any]
) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    classes = [type(module) for module in net.modules()]
    with pytest.raises(error, match=said):
        gs.apply(net, {"format": 1, "gradsurgery": "0.1.0", "operations": [GOOD, {**GOOD, **change}]})
    assert not gs.operations(net)
    assert [type(module) for module in net.modules()] == classes


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (None, "the recipe is a NoneType"),
        ("{}", "the recipe is a str.*json.load"),
        ([GOOD], "the recipe is a list"),
        ({}, "without a number 'format'"),
        ({"a": 1, "state_dict": {}}, "a dict of 'a', 'state_dict', without"),
        ({"format": True, "operations": [GOOD]}, "without a number 'format'"),
        ({"format": 2, "gradsurgery": "9.0", "operations": [GOOD]}, "has format 2, written by gradsurgery 9.0"),
        ({"format": 1}, "operations=None"),
        ({"format": 1, "operations": []}, "operations=\\[\\]"),
        ({"format": 1, "operations": GOOD}, "operations={"),
        ({"format": 1, "operations": [GOOD], "heads": []}, "the recipe has 'heads', which means nothing"),
        ({"format": 1, "operations": ["layer3"]}, "operation 0 of the recipe, there is 'layer3'"),
        ({"format": 1, "operations": [{"at": "0", "operator": "ScaleGradient"}]}, "a ScaleGradient without 'scale'"),
    ],
)
def test_a_malformed_recipe_is_refused(recipe: Any, said: str) -> None:
    with pytest.raises(gs.SurgeryError, match=said):
        gs.apply(nn.Sequential(nn.Linear(2, 2)), recipe)


def test_the_example_is_run_once_everything_is_there() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    recipe = {"format": 1, "operations": [GOOD]}
    with pytest.raises(gs.CaptureError, match="during the run on the example"):
        gs.apply(net, recipe, example=torch.ones(1, 3))
    assert not gs.operations(net)
    twin = gs.apply(net, recipe, example=torch.ones(1, 2), inplace=False)
    assert len(gs.operations(twin)) == 1
    assert not gs.operations(net)
