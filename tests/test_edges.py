"""Edges: the value that one consumer receives is operated on, and what the others receive is not."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsurgery as gs

FACTOR = 0.5


class Net(nn.Module):
    """One value, ``a(x)``, with consumers of every kind. ``edge`` is written into the source of the reference."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.act = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h)
        z = self.c(input=h)
        w = self.act(h)
        s = h.sigmoid()
        p = F.softmax(h, 1)
        u = torch.cat([y, z, w], 1).sum() + (s * y).sum() - (-p)[:, 1:].sum()
        z += y
        q = h.clone()
        q.add_(h)
        return u + z.square().sum() + q.square().sum() + (h - y).sum()


def reference(net: Net, x: Tensor, edge: str) -> Tensor:
    def on(name: str, value: Tensor) -> Tensor:
        return gs.scale_gradient(value, FACTOR) if name == edge else value

    h = net.a(x)
    y = net.b(on("a -> b", h))
    z = net.c(input=on("a -> c", h))
    w = net.act(on("a -> act", h))
    s = on("a -> :sigmoid", h).sigmoid()
    p = F.softmax(on("a -> :softmax", h), 1)
    parts = torch.cat([on("b -> :cat", y), on("c -> :cat", z), w], 1)
    u = parts.sum() + (on(":sigmoid -> :mul", s) * on("b -> :mul", y)).sum()
    u = u - on(":neg -> :getitem", -on(":softmax -> :neg", p))[:, 1:].sum()
    z += on("b -> :add@2", y)
    q = h.clone()
    q.add_(on("a -> :add_", h))
    return u + z.square().sum() + q.square().sum() + (on("a -> :sub@1", h) - on("b -> :sub@1", y)).sum()


EDGES = [
    "a -> b",
    "a -> c",
    "a -> act",
    "a -> :sigmoid",
    "a -> :softmax",
    "b -> :cat",
    "c -> :cat",
    ":sigmoid -> :mul",
    "b -> :mul",
    ":softmax -> :neg",
    ":neg -> :getitem",
    "a -> :add_",
    "a -> :sub@1",
    "b -> :sub@1",
]


def gradients(loss: Tensor, net: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


def add_before_the_inplace_one(net: Net, x: Tensor) -> str:
    """Which ``add`` the statement ``z += y`` is, found in the list that a user would look at."""
    rows = [site for site in gs.sites(net, ":add@*", example=x) if "+=" in line_of(site.source)]
    return rows[0].address


def line_of(source: str) -> str:
    file, _, number = source.rpartition(":")
    with open(file) as lines:  # noqa: PTH123
        return lines.readlines()[int(number) - 1]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("with_example", [False, True])
def test_only_the_named_consumer_receives_the_operated_value(edge, with_example):
    net, x = Net(), torch.randn(4, 3)
    right = reference(net, x, edge)
    expected, plain = gradients(right, net), gradients(net(x), net)
    gs.insert_scale_gradient(net, edge, FACTOR, example=x if with_example else None)
    loss = net(x)
    got = gradients(loss, net)
    assert torch.equal(loss, right)
    assert all(map(torch.equal, got, expected))
    assert not all(map(torch.equal, got, plain))
    gs.remove(net, edge)
    assert type(net) is Net
    assert all(map(torch.equal, gradients(net(x), net), plain))


def test_the_right_side_of_an_augmented_assignment():
    net, x = Net(), torch.randn(4, 3)
    expected = gradients(reference(net, x, "b -> :add@2"), net)
    gs.insert_scale_gradient(net, f"b -> {add_before_the_inplace_one(net, x)}", FACTOR)
    assert all(map(torch.equal, gradients(net(x), net), expected))


@pytest.mark.parametrize("edge", ["a -> b", "b -> :cat", ":sigmoid -> :mul", "a -> :sub@1"])
def test_compiled_exported_and_copied(edge):
    net, x = Net(), torch.randn(4, 3)
    expected = gradients(reference(net, x, edge), net)
    gs.insert_scale_gradient(net, edge, FACTOR)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, gradients(compiled(x), net), expected))
    exported = torch.export.export(net, (x,)).module()
    assert all(map(torch.equal, gradients(exported(x), exported), expected))
    twin = copy.deepcopy(net)
    assert all(map(torch.equal, gradients(twin(x), twin), expected))


def test_several_edges_and_two_operators_at_one():
    net, x = Net(), torch.randn(4, 3)
    once = gradients(reference(net, x, "a -> b"), net)
    gs.insert_scale_gradient(net, ["a -> b", "a -> c"], FACTOR, expect=2)
    gs.insert_scale_gradient(net, "a -> b", 2.0)
    gs.remove(net, "a -> c")
    assert [operation.operator.scale for operation in gs.operations(net)] == [FACTOR, 2.0]
    assert all(map(torch.equal, gradients(net(x), net), gradients(reference(net, x, "none"), net)))
    assert not all(map(torch.equal, gradients(net(x), net), once))


def test_the_shortcut_of_a_residual_block_alone():
    model, x = timm.create_model("resnet18").eval(), torch.randn(2, 3, 64, 64)
    hooked = copy.deepcopy(model)
    hooked.layer3[0].downsample.register_forward_hook(lambda m, i, value: gs.reverse_gradient(value, FACTOR))
    expected = gradients(hooked(x).square().sum(), hooked)
    gs.insert_grl(model, "layer3.0.downsample -> layer3.0:add", FACTOR)
    assert all(map(torch.equal, gradients(model(x).square().sum(), model), expected))
    gs.remove(model)
    gs.insert_grl(model, "layer3 -> layer4", FACTOR)
    assert gs.operations(model)[0].address == "layer3 -> layer4"


@pytest.mark.parametrize(
    ("edge", "error", "words"),
    [
        ("a -> d", gs.AddressError, "does not have"),
        ("d -> a", gs.AddressError, "does not have"),
        ("a -> b -> c", gs.AddressError, "two ends"),
        ("a[0] -> b", gs.AddressError, "without globs, elements"),
        ("* -> b", gs.AddressError, "without globs"),
        ("a -> b.x", gs.AddressError, "does not have"),
        ("b:x -> a", gs.AddressError, "not called in the forward"),
        ("a -> :add", gs.AddressError, "times"),
    ],
)
def test_what_is_no_edge_is_refused(edge, error, words):
    net = Net()
    with pytest.raises(error, match=words):
        gs.insert_grl(net, edge)
    assert type(net) is Net


def test_values_that_never_meet_are_refused():
    net, x = Net(), torch.randn(4, 3)
    with pytest.raises(gs.AddressError, match="never ran"):
        gs.insert_grl(net, "b -> c", example=x)
    assert type(net) is Net
    gs.insert_grl(net, "b -> c")
    with pytest.raises(gs.CaptureError, match="never received"):
        net(x)
    with torch.no_grad():
        assert torch.equal(net(x), reference(net, x, "none"))


@pytest.mark.parametrize("edge", ["a -> act", "c -> :add@2"])
def test_a_consumer_that_changes_the_value_is_refused(edge):
    net, x = Net(inplace=True), torch.randn(4, 3)
    edge = edge.replace(":add@2", add_before_the_inplace_one(net, x))
    gs.insert_grl(net, edge)
    with pytest.raises(gs.CaptureError, match="in place"):
        net(x)
