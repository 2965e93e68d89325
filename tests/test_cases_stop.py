"""Inputs from public bug reports, with their right values: what stops, freezes or shares a gradient."""

import threading

import pytest
import torch
from test_cases import ONE, Domains, gradients, linear, net
from torch import Tensor, nn

import gradsurgery as gs


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.skip = linear(2.0), linear(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + self.skip(x)


def test_b26_a_stop_on_a_skip_path_starves_its_only_layer() -> None:
    model = gs.insert_stop_gradient(Skip(), "skip")
    assert gradients(model) == [1.0, None]
    assert [operation.address for operation in gs.operations(model)] == ["skip"]
    assert gs.audit(model, ONE).blocked == ["skip.weight"]


def test_b27_a_frozen_head_still_sends_its_loss_to_the_trunk() -> None:
    model = Domains()
    model.domain.requires_grad_(False)
    assert gradients(model) == [8.0, 2.0, None]
    gs.insert_stop_gradient(model, "domain", side="input")
    assert gradients(model) == [3.0, 2.0, None]


def test_b28_a_frozen_norm_keeps_its_statistics() -> None:
    norm, x = nn.BatchNorm1d(1), torch.tensor([[0.0], [10.0]], requires_grad=True)
    gs.frozen_transform(x, norm).pow(2).sum().backward()
    assert (norm.running_mean.item(), norm.running_var.item(), norm.num_batches_tracked.item()) == (0.0, 1.0, 0)
    assert norm.weight.grad is None
    assert x.grad is not None


def test_b53_the_dtype_through_autocast() -> None:
    model = gs.insert_grl(net(), "0", lambd=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(ONE).dtype == torch.bfloat16
        assert gradients(model) == [-1.5, 2.0]


def test_b55_b56_a_stop_gradient_that_is_used() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = linear(2.0), linear(3.0)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h.detach()
            return self.last(h)

    assert gradients(Forgotten()) == [3.0, 2.0]
    assert gradients(gs.insert_stop_gradient(Forgotten(), "first")) == [None, 2.0]
    graph_module = gs.insert_stop_gradient(torch.fx.symbolic_trace(Forgotten()), "first")
    graph_module.graph.lint()
    assert gradients(graph_module) == [None, 2.0]


def test_b57_a_reversal_spares_what_comes_after_it() -> None:
    model = nn.Sequential(linear(2.0), linear(3.0), linear(5.0))
    assert gradients(gs.insert_grl(model, "0")) == [-15.0, 10.0, 6.0]
    gs.remove(model)
    assert gradients(gs.insert_grl(model, "2")) == [-15.0, -10.0, -6.0]


def test_b58_nothing_is_shared_between_two_threads() -> None:
    model = gs.insert_grl(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "1", lambd=0.5)
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]

    def run(x: Tensor) -> None:
        for _ in range(50):
            x.grad = None
            model(x).sum().backward()

    threads = [threading.Thread(target=run, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gs.remove(model)
    for x in inputs:
        y = x.detach().clone().requires_grad_()
        model(y).sum().backward()
        assert torch.equal(x.grad, y.grad * -0.5)
    with pytest.raises(gs.SurgeryError, match="DataParallel"):
        gs.insert_grl(nn.DataParallel(model), "1")
