"""Heads: one forward, two losses, and each gradient as in a model that was cut by hand."""

import copy
import pickle
import threading

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgery as gs

STRENGTH = 0.5


class Trunk(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.reentrant = reentrant

    def block(self, x: Tensor) -> Tensor:
        return self.norm(self.b(x)).relu()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.reentrant is not None and self.training:
            h = checkpoint(self.block, h, use_reentrant=self.reentrant) + h
        else:
            h = self.block(h) + h
        return self.c(h)


class CutByHand(nn.Module):
    """The same trunk with the head written into its forward."""

    def __init__(self, trunk: Trunk, head: nn.Module, at: str, operator: bool) -> None:
        super().__init__()
        self.trunk, self.head, self.at, self.operator = trunk, head, at, operator

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = {"a": self.trunk.a(x)}
        values["b"] = self.trunk.b(values["a"])
        values["norm"] = self.trunk.norm(values["b"])
        values[":add"] = values["norm"].relu() + values["a"]
        value = values[self.at]
        return self.trunk.c(values[":add"]), self.head(gs.reverse_gradient(value, STRENGTH) if self.operator else value)


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def grads(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    losses.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def both(output: Tensor, made: Tensor) -> Tensor:
    return output.square().sum() + made.square().sum()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("operator", [True, False])
@pytest.mark.parametrize("at", ["a", "b", "norm", ":add"])
def test_each_gradient_is_that_of_the_model_cut_by_hand(at, operator, training):
    model, x = Trunk(), torch.randn(6, 3)
    cut = CutByHand(copy.deepcopy(model), head(), at, operator).train(training)
    keys = list(model.state_dict())
    reversal = gs.GradientReversal(STRENGTH) if operator else None
    assert gs.attach_head(model, at, copy.deepcopy(cut.head), name="aux", operator=reversal) is model
    model.train(training)
    x2 = x.clone().requires_grad_()
    x.requires_grad_()
    right, made = cut(x)
    output, heads = model(x2)
    assert torch.equal(output, right)
    assert list(heads) == ["aux"]
    assert torch.equal(heads["aux"], made)
    expected, got = grads(cut, both(right, made)), grads(model, both(output, heads["aux"]))
    assert len(got) == len(expected)
    for name, gradient in got.items():
        other = name.replace("aux", "head") if name.startswith("aux") else f"trunk.{name}"
        assert torch.equal(gradient, expected[other]), name
    assert torch.equal(x2.grad, x.grad)
    assert torch.equal(model.norm.running_mean, cut.trunk.norm.running_mean)  # each batch was seen once
    assert list(model.state_dict())[: len(keys)] == keys
    gs.remove(model)
    assert type(model) is Trunk
    assert list(model.state_dict()) == keys
    assert isinstance(model(x), Tensor)


def test_several_heads_one_in_training_only():
    model, x = Trunk(), torch.randn(6, 3)
    gs.attach_head(model, "a", head(), name="one", operator=gs.GradientReversal())
    gs.attach_head(model, "norm", head(), name="two", training_only=True)
    gs.insert_scale_gradient(model, "a", 0.5)
    rows = gs.operations(model)
    assert [(row.address, row.side, row.head) for row in rows] == [
        ("a", "head", "one"),
        ("a", "output", None),
        ("norm", "head", "two"),
    ]
    assert list(model(x)[1]) == ["one", "two"]
    assert list(model.eval()(x)[1]) == ["one"]
    gs.remove(model, "a")
    assert isinstance(model(x), Tensor)
    assert list(model.train()(x)[1]) == ["two"]
    with gs.disabled(model):
        assert isinstance(model(x), Tensor)


def test_checkpointing():
    plain, model, x = Trunk(), Trunk(reentrant=False), torch.randn(6, 3)
    model.load_state_dict(plain.state_dict())
    made = head()
    for net in (plain, model):
        gs.attach_head(net, "norm", copy.deepcopy(made), operator=gs.GradientReversal(STRENGTH))
    expected, got = (grads(net, both(out, heads["aux"])) for net in (plain, model) for out, heads in [net(x)])
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    model.reentrant = True
    with pytest.raises(gs.CaptureError, match="use_reentrant=False"):
        model(x)


def test_copies_pickles_twins_and_tools():
    model, x = gs.attach_head(Trunk(), "b", head(), operator=gs.GradientReversal(STRENGTH)).eval(), torch.randn(6, 3)
    output, heads = model(x)
    expected = grads(model, both(output, heads["aux"]))
    twin = gs.insert_scale_gradient(model, "a", 1.0, inplace=False)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), twin]
    others += [torch.export.export(model, (x,)).module(), torch.compile(model, fullgraph=True, backend="aot_eager")]
    for other in others:
        again, made = other(x)
        assert torch.equal(made["aux"], heads["aux"])
        got = grads(other, both(again, made["aux"]))
        assert all(torch.equal(g, expected[name.removeprefix("_orig_mod.")]) for name, g in got.items())
        assert len(got) == len(expected)


def test_scripted(scripting):
    model, x = gs.attach_head(Trunk(), "b", head(), operator=gs.GradientReversal(STRENGTH)).eval(), torch.randn(6, 3)
    output, heads = model(x)
    expected = grads(model, both(output, heads["aux"]))
    scripted = torch.jit.script(model)
    for _ in range(3):
        again, made = scripted(x)
        got = grads(scripted, both(again, made["aux"]))
    assert torch.equal(made["aux"], heads["aux"])
    # TorchScript differentiates tanh and BatchNorm by formulas of its own, which round otherwise.
    torch.testing.assert_close(got, expected)


def test_threads_do_not_share_a_tap():
    model = gs.attach_head(Trunk(), "b", head()).eval()
    inputs, made = [torch.randn(6, 3) for _ in range(8)], {}

    def work(k: int) -> None:
        for _ in range(20):
            made[k] = model(inputs[k])[1]["aux"]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(made[k], model(inputs[k])[1]["aux"]) for k in range(8))


@pytest.mark.parametrize(
    ("name", "at", "options"),
    [
        ("resnet50", "global_pool", {}),
        ("vit_small_patch16_224", "norm", {"img_size": 64}),
        ("swin_tiny_patch4_window7_224", "layers.2", {"img_size": 64, "window_size": 2}),
    ],
)
def test_domain_adversarial_training_on_timm(name, at, options):
    model, x = timm.create_model(name, **options).eval(), torch.randn(2, 3, 64, 64)
    cut, kept = copy.deepcopy(model), []
    cut.get_submodule(at).register_forward_hook(lambda module, args, value: kept.append(value))
    domain = gs.DomainHead()
    gs.attach_head(model, at, domain, operator=gs.GradientReversal(STRENGTH), name="domain", example=x)
    other = copy.deepcopy(domain)
    output, heads = model(x)
    got = grads(model, both(output, heads["domain"]))
    right = cut(x)
    cut.domain = other
    expected = grads(cut, both(right, other(gs.reverse_gradient(kept[0], STRENGTH))))
    assert heads["domain"].shape == (2, 2)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in got)
    assert list(got)[-1] == "domain.logits.bias"


@pytest.mark.parametrize(
    ("shape", "channels", "vector"),
    [
        ((2, 7), None, lambda x: x),
        ((2, 5, 7), None, lambda x: x.mean(1)),
        ((2, 7, 4, 4), None, lambda x: x.mean((2, 3))),
        ((2, 4, 4, 7), None, lambda x: x.mean((1, 2))),
        ((2, 7, 3, 4), 7, lambda x: x.mean((2, 3))),
        ((2, 3, 4, 7), 7, lambda x: x.mean((1, 2))),
    ],
)
def test_domain_head_pools_any_layout(shape, channels, vector):
    layer, x = gs.DomainHead(num_domains=3, hidden=8, channels=channels), torch.randn(shape)
    made = layer(x)
    assert made.shape == (2, 3)
    assert torch.equal(made, layer(vector(x)))


@pytest.mark.parametrize("shape", [(2, 4, 4, 4), (2, 3, 4, 5), (2, 2, 2, 2, 2), (2,)])
def test_domain_head_refuses_to_guess(shape):
    with pytest.raises(gs.OperatorError, match="DomainHead"):
        gs.DomainHead()(torch.randn(shape))


@pytest.mark.parametrize(
    ("at", "given", "options", "error", "words"),
    [
        ("nope", head(), {}, gs.AddressError, "no module 'nope'"),
        (["a", "b"], head(), {}, gs.AddressError, "exactly 1 place"),
        ("a", head(), {"name": "norm"}, gs.SurgeryError, "already"),
        ("a", head(), {"name": "x.y"}, gs.SurgeryError, "identifier"),
        ("a", lambda x: x, {}, gs.OperatorError, "nn.Module"),
        ("a", head(), {"operator": nn.Linear(4, 4)}, gs.SurgeryError, "in front of the head"),
        ("a", head(), {"operator": gs.GradientReversal}, gs.OperatorError, "instance"),
        ("a", nn.Linear(3, 3), {"example": torch.randn(6, 3)}, gs.OperatorError, "raised RuntimeError"),
        ("a", head(), {"example": torch.randn(6, 9)}, gs.CaptureError, "run on the example"),
    ],
)
def test_refused_at_once(at, given, options, error, words):
    model = Trunk()
    with pytest.raises(error, match=words):
        gs.attach_head(model, at, given, **options)
    assert type(model) is Trunk
    assert not gs.operations(model)
    assert not hasattr(model, "aux")


def test_refused_when_run():
    model, x = Trunk(), torch.randn(6, 3)
    gs.attach_head(model, "a", nn.Identity(), name="fine")
    gs.attach_head(model, "b", nn.LSTM(4, 4), name="several")
    with pytest.raises(gs.OperatorError, match="returned a tuple"):
        model(x)
    gs.remove(model)
    looped = gs.attach_head(Twice(), "layer", nn.Linear(3, 1))
    with pytest.raises(gs.CaptureError, match="2 values passed"):
        looped(x)
    looped.times = 0
    with pytest.raises(gs.CaptureError, match="nothing passed"):
        looped(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(3, 3), 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x
