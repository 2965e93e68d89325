"""Inputs from public bug reports, with their right values: what tracing and rewriting with fx loses or freezes."""

import copy
import inspect
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from benchmarks._reference import same_output, step
from test_cases import ONE, gradients, linear, net
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradsurgery as gs


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = pytest.mark.parametrize("way", [copied, pickled, saved])


class Dropped(nn.Module):
    """A functional dropout that reads ``training``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.first(x) * 1.0, 0.5, self.training)


@pytest.mark.parametrize("inserted_in_train", [True, False])
@pytest.mark.parametrize("at", [":dropout", ":mul", "first", ""])
def test_b34_dropout_follows_the_mode(at: str, inserted_in_train: bool) -> None:
    model = Dropped().train(inserted_in_train)
    plain = copy.deepcopy(model)
    gs.insert_grl(model, at, lambd=0.5)
    x = torch.randn(2, 8)
    for training in (True, False, True):
        model.train(training), plain.train(training)
        results = []
        for one in (model, plain):
            one.zero_grad()
            torch.manual_seed(0)
            output = one(x)
            output.pow(2).sum().backward()
            results.append((output.detach(), one.first.weight.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1] * -0.5)
        assert bool((results[0][0] == 0).any()) is training


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x) / 2 * 1.0


@pytest.mark.parametrize("at", [":mul", "c", "c.0", ""])
def test_b36_hooks_stay_alive_everywhere(at: str) -> None:
    model, calls = Hooked(), []
    model.register_forward_hook(lambda _module, _args, output: output * 10)
    handle = model.c.register_forward_hook(lambda _module, _args, output: calls.append(1) or output * 7)
    gs.insert_grl(model, at)
    assert model(ONE).item() == 210.0
    handle.remove()
    assert model(ONE).item() == 30.0
    assert len(calls) == 1
    assert isinstance(model.c, nn.Sequential)
    gs.remove(model)
    assert model(ONE).item() == 30.0


@WAYS
def test_b37_copies_of_an_operated_graph_module(way: Callable[[nn.Module], nn.Module]) -> None:
    graph_module = torch.fx.symbolic_trace(net())
    graph_module.meta["mine"] = 7
    gs.insert_grl(graph_module, "0", lambd=0.5)
    assert gradients(graph_module) == [-1.5, 2.0]
    other = way(graph_module)
    if way is copied:  # torch's own pickle of a GraphModule leaves meta out
        assert other.meta["mine"] == 7
    assert gradients(other) == [-1.5, 2.0]
    assert [operation.operator.lambd for operation in gs.operations(other)] == [0.5]
    assert gradients(gs.remove(other)) == [3.0, 2.0]
    assert gradients(graph_module) == [-1.5, 2.0]


@WAYS
@pytest.mark.parametrize("at", [":dropout", "first"])
def test_b37_b38_copies_of_an_operated_model(at: str, way: Callable[[nn.Module], nn.Module]) -> None:
    model = gs.insert_grl(Dropped(), at, lambd=0.5).train()
    other = way(model)
    x = torch.randn(2, 8)
    assert torch.equal(other.eval()(x), other(x))
    assert torch.equal(other(x), model.eval()(x))
    other.train(), model.train()
    outputs = []
    for one in (model, other):
        torch.manual_seed(0)
        one(x).sum().backward()
        outputs.append(one.first.weight.grad)
    assert torch.equal(*outputs)
    gs.operations(other)[0].operator.lambd = 2.0
    assert [operation.operator.lambd for operation in gs.operations(model)] == [0.5]
    assert type(gs.remove(other)) is Dropped
    assert len(gs.operations(model)) == 1


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(2.0)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("at", ["", "0", "0.inner", "1.inner"])
def test_b42_arguments_passed_on(at: str) -> None:
    model = nn.Sequential(Passing(), Passing())
    signature = inspect.signature(model[0].forward)
    gs.insert_grl(model, at)
    assert inspect.signature(model[0].forward) == signature
    assert model(ONE).item() == 4.0
    assert gradients(model) == [-2.0, -2.0 if at in ("", "1.inner") else 2.0]


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = linear(2.0)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] > 0
        h = self.first(torch.Tensor.flatten(x)[: len(x)].view(-1, 1))
        return torch.add(h, torch.arange(x.size(1), dtype=h.dtype))


def test_b44_a_forward_that_reads_shapes_is_opened() -> None:
    model = Shapes()
    gs.insert_grl(model, ":add")
    assert model(ONE).item() == 2.0
    assert gradients(model) == [-1.0]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = linear(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.first(x), torch.randn(1, 1))


def test_b45_noise_is_drawn_anew() -> None:
    model = gs.insert_grl(Noisy(), ":add")
    assert len({model(ONE).item() for _ in range(4)}) == 4
    assert list(model.state_dict()) == ["first.weight"]
    assert gradients(model) == [-1.0]
    torch.manual_seed(1)
    operated = model(ONE)
    torch.manual_seed(1)
    assert torch.equal(operated, gs.remove(model)(ONE))


@pytest.mark.parametrize("at", ["backbone", "", "classifier", "backbone.layer4"])
def test_b47_segmentation_models_keep_their_ordered_dict(at: str) -> None:
    model = torchvision.models.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=3).eval()
    x = torch.randn(1, 3, 32, 32)
    expected = model(x)
    inside = type(model.backbone(x))
    gs.insert_grl(model, at)
    assert same_output(model(x), expected)
    assert type(model.backbone(x)) is inside is OrderedDict


def test_b48_methods_and_attributes_stay() -> None:
    model = timm.create_model("resnet18", num_classes=7).eval()
    x = torch.randn(1, 3, 64, 64)
    features = model.forward_features(x)
    for at in ("layer3", "", "layer3.0:add"):
        gs.insert_grl(model, at)
    assert isinstance(model, timm.models.ResNet)
    assert type(model).__name__ == "ResNet"
    assert (model.num_features, model.get_classifier().out_features) == (512, 7)
    assert torch.equal(model.forward_features(x), features)
    model.reset_classifier(5)
    assert model(x).shape == (1, 5)
    assert len(model.layer3) == 2


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.count = linear(2.0), linear(3.0), 0

    def inside(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inside, x, use_reentrant=False)) * 1.0


@pytest.mark.parametrize("at", ["inner", "", "last"])
def test_b49_checkpointing_still_runs_twice(at: str) -> None:
    model = gs.insert_grl(Checkpointed(), at, lambd=0.5)
    assert gradients(model) == [-1.5, 2.0 if at == "inner" else -1.0]
    assert model.count == 2


def test_b49_an_op_beside_a_checkpoint_is_right_or_refused() -> None:
    model = Checkpointed()
    try:
        gs.insert_grl(model, ":mul", lambd=0.5)
    except gs.CaptureError:
        assert type(model) is Checkpointed
        return
    assert gradients(model) == [-1.5, -1.0]
    assert model.count == 2


@pytest.mark.parametrize("at", ["layers.0.self_attn", "layers.1", "layers.0.linear1", ""])
@pytest.mark.parametrize("training", [True, False])
def test_b51_inside_a_transformer_encoder(at: str, training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    pristine = nn.TransformerEncoder(layer, 2)

    def call(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        return model(x), {"x": x}

    def scale(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, None]) -> object:
        first = output[0] if isinstance(output, tuple) else output
        scaled = first.clone()
        scaled.register_hook(lambda gradient: gradient * -0.5)
        return (scaled, *output[1:]) if isinstance(output, tuple) else scaled

    model, reference = gs.insert_grl(copy.deepcopy(pristine), at, lambd=0.5), copy.deepcopy(pristine)
    reference.get_submodule(at).register_forward_hook(scale)
    got, right = step(model, call, training), step(reference, call, training)
    assert same_output(got.output, right.output)
    assert got.gradient_faults(right) == []
    pristine.eval(), model.eval()
    with torch.no_grad():  # the fast path of an untouched encoder does not call its layers' parts at all
        assert torch.allclose(model(torch.ones(1, 3, 8)), pristine(torch.ones(1, 3, 8)), atol=1e-6)


class Recursive(nn.Module):
    """Calls its own forward: twice more, each with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear(2.0), linear(3.0), linear(5.0)])

    def forward(self, x: Tensor, left: int = 2) -> Tensor:
        h = torch.relu(self.layers[left](x))
        return h if left == 0 else self.forward(h, left - 1)


@pytest.mark.parametrize(("at", "factors"), [("@0", [1, 1, -1]), ("@1", [1, -1, -1]), ("@*", [-1, 1, -1])])
def test_ops_of_a_forward_that_calls_itself(at: str, factors: list[int]) -> None:
    model = gs.insert_grl(Recursive(), ":relu" + at)
    assert gradients(model) == [15.0 * factors[0], 10.0 * factors[1], 6.0 * factors[2]]
