"""Heads in training: under DDP in two processes, compiled, and with an optimizer that was built too early."""

import copy
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_heads import STRENGTH, CutByHand, Trunk, both, head
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsurgery as gs


def operated_and_cut(at: str) -> tuple[nn.Module, nn.Module]:
    """One model with a head by this package, and the same with the head written into its forward."""
    torch.manual_seed(0)
    model = Trunk()
    cut = CutByHand(copy.deepcopy(model), head(), at, True)
    return gs.attach_head(model, at, copy.deepcopy(cut.head), operator=gs.GradientReversal(STRENGTH)), cut


def named(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        bare = name.replace("module.", "").replace("_orig_mod.", "").replace("trunk.", "")
        found[bare.replace("aux.", "head.")] = parameter.grad
    return found


def assert_same_steps(model: nn.Module, cut: nn.Module, x: Tensor) -> None:
    """Two steps of training keep all gradients equal to the bit."""
    optimizers = [torch.optim.SGD(net.parameters(), lr=2.0**-4) for net in (model, cut)]
    for _ in range(2):
        output, heads = model(x)
        right, made = cut(x)
        assert torch.equal(output, right)
        assert torch.equal(heads["aux"], made)
        both(output, heads["aux"]).backward()
        both(right, made).backward()
        expected, got = named(cut), named(model)
        assert got.keys() == expected.keys()
        for name, gradient in got.items():
            assert torch.equal(gradient, expected[name]), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def two(rank: int, store: str) -> None:
    """One of two processes, each with its own half of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(rank))
    for at in ("a", "norm", ":add"):
        model, cut = operated_and_cut(at)
        assert_same_steps(DistributedDataParallel(model), DistributedDataParallel(cut), x)
        alone = operated_and_cut(at)[1]
        both(*alone(x)).backward()
        # What was averaged is not what this process alone would have had.
        first = DistributedDataParallel(operated_and_cut(at)[0])
        output, heads = first(x)
        both(output, heads["aux"]).backward()
        assert not torch.equal(named(first)["a.weight"], named(alone)["a.weight"])
        del model, cut, first
    dist.barrier()
    time.sleep(0.5)  # the other one may still be reading
    # All is checked. Ending the interpreter in the ordinary way lets gloo's threads abort it now and then.
    os._exit(0)


def test_ddp_in_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(two, (str(tmp_path / "store"),), nprocs=2)


@pytest.mark.parametrize("at", ["a", "norm", ":add"])
def test_compiled(at: str) -> None:
    model, cut = operated_and_cut(at)
    assert_same_steps(torch.compile(model, backend="aot_eager", fullgraph=True), cut, torch.randn(6, 3))


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda make: make.__name__
)
def test_an_optimizer_that_was_built_before_a_lazy_head_trains_it(make: type[torch.optim.Optimizer]) -> None:
    """A lazy parameter stays the same object when the first forward makes it."""
    model = gs.attach_head(Trunk(), "norm", gs.DomainHead(hidden=3), name="domain", operator=gs.GradientReversal())
    optimizer = make(model.parameters(), lr=0.1)
    output, heads = model(torch.randn(6, 3))
    both(output, heads["domain"]).backward()
    before = model.domain.hidden.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.domain.hidden.weight, before)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_an_optimizer_that_looks_at_its_parameters_says_that_they_are_not_made() -> None:
    model = gs.attach_head(Trunk(), "norm", gs.DomainHead(hidden=3), name="domain")
    with pytest.raises(ValueError, match="uninitialized parameter.*Call `forward`"):
        torch.optim.Adagrad(model.parameters())
    model(torch.randn(6, 3))
    torch.optim.Adagrad(model.parameters())
