"""Functions that a forward hands over, or reaches through a decorator that hands no counter on."""

import functools
import inspect

import pytest
import torch
from capture_helpers import Base, grads

import gradsurgery as gs


def weights(module, x):
    """The gradients of the weights, by the name of the child."""
    _, _, a, _, b, _ = grads(module, x)
    return {"a": a.clone(), "b": b.clone()}


def starred(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def picky(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        kwargs = {name: value for name, value in kwargs.items() if name == "scale"}
        return function(*args, **kwargs)

    return wrapper


@starred
def starred_helper(x):
    return torch.tanh(x)


@picky
def picky_helper(x, scale=1.0):
    return torch.tanh(x) * scale


@pytest.mark.parametrize("helper", [starred_helper, picky_helper])
@pytest.mark.parametrize("given", [True, False])
def test_a_helper_whose_decorator_hands_no_counter_on_is_one_op(helper, given):
    class Decorated(Base):
        def forward(self, x):
            x = helper(self.a(x))
            return torch.tanh(self.b(x)) + torch.tanh(x)

    x = torch.randn(3, 4)
    model = Decorated()
    example = x if given else None
    listed = [site.address for site in gs.sites(model, ":*", example=example)]
    assert listed == [":a", f":{helper.__name__}", ":b", ":tanh@0", ":tanh@1", ":add"]
    plain = weights(model, x)
    gs.insert_grl(model, ":tanh@0", example=example)  # that of the forward, not that of the helper
    assert torch.equal(weights(model, x)["b"], -plain["b"])
    gs.remove(model)
    gs.insert_grl(model, f":{helper.__name__}", example=example)
    assert torch.equal(weights(model, x)["a"], -plain["a"])
    assert torch.equal(weights(model, x)["b"], plain["b"])


def test_a_function_that_is_handed_over_shows_the_signature_it_was_written_with():
    def chunked(function, x):  # as transformers does before it cuts the input of a feed-forward into chunks
        assert list(inspect.signature(function).parameters) == ["x"]
        return function(x)

    class HandsOver(Base):
        def feed(self, x):
            return torch.tanh(self.b(x)) + torch.tanh(x)

        def forward(self, x):
            return chunked(self.feed, torch.tanh(self.a(x)))

    model, x = HandsOver(), torch.randn(3, 4)
    plain = weights(model, x)
    gs.insert_grl(model, ":tanh@1", example=x)
    assert torch.equal(weights(model, x)["b"], -plain["b"])


def test_the_class_that_is_recorded_goes_by_its_own_name():
    seen = []

    class Named(Base):
        def forward(self, x):
            seen.append(str(type(self)))  # transformers looks up by it what a model records
            return torch.tanh(self.a(x))

    model, x = Named(), torch.randn(3, 4)
    gs.insert_grl(model, ":tanh", example=x)
    model(x)
    assert set(seen) == {str(Named)}
