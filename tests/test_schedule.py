"""The strength of a reversal over a training run."""

import json
import math

import pytest
from torch import nn

import gradsurgery as gs


def reversed_net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    return gs.insert_grl(net, ["0", "1"])


def lambdas(net: nn.Module) -> list[float]:
    return [operation.operator.lambd for operation in gs.operations(net)]


def dann(progress: float, gamma: float = 10.0) -> float:
    return 2 / (1 + math.exp(-gamma * progress)) - 1


@pytest.mark.parametrize(
    ("options", "at"),
    [
        # The figures of a 1000-step run that a ramp tied to a copied horizon of 10000 gets wrong.
        ({}, {0: 0.0, 100: 0.462117, 500: 0.986614, 1000: 0.999909}),
        ({"gamma": 5.0}, {0: 0.0, 500: dann(0.5, 5.0)}),
        ({"max_lambd": 0.25}, {0: 0.0, 1000: 0.25 * dann(1.0)}),
        ({"ramp": "linear"}, {0: 0.0, 250: 0.25, 1000: 1.0}),
        ({"ramp": "cosine"}, {0: 0.0, 500: 0.5, 1000: 1.0}),
        ({"ramp": "constant", "max_lambd": 0.5}, {0: 0.5, 1000: 0.5}),
        ({"ramp": lambda p: p**2}, {0: 0.0, 500: 0.25, 1000: 1.0}),
    ],
)
def test_ramps(options, at):
    net = reversed_net()
    scheduler = gs.GRLScheduler(net, total_steps=1000, **options)
    for step in range(1001):
        if step in at:
            assert lambdas(net) == pytest.approx([at[step]] * 2, abs=1e-6)
            assert scheduler.last_step == step
        if step < 1000:
            scheduler.step()


def test_nothing_but_step_moves_it():
    net = reversed_net()
    scheduler = gs.GRLScheduler(net, total_steps=10, ramp="linear")
    scheduler.step()
    before = lambdas(net)
    net.eval()
    net.train()
    assert lambdas(net) == before == [0.1, 0.1]


def test_a_restart_goes_on_where_it_stopped():
    first = gs.GRLScheduler(reversed_net(), total_steps=10)
    for _ in range(4):
        first.step()
    net = reversed_net()
    second = gs.GRLScheduler(net, total_steps=99)
    second.load_state_dict(first.state_dict())
    assert lambdas(net) == [first.last_lambd] * 2
    first.step()
    second.step()
    assert second.last_lambd == first.last_lambd
    assert repr(second) == f"GRLScheduler(step 5 of 10, lambd={dann(0.5):.6g})"


@pytest.mark.parametrize("ramp", ["linear", "cosine", "constant", "dann"])
def test_a_saved_state_brings_its_ramp_and_its_strength(ramp):
    first = gs.GRLScheduler(reversed_net(), total_steps=10, ramp=ramp, gamma=4.0, max_lambd=0.25)
    for _ in range(3):
        first.step()
    net = reversed_net()
    second = gs.GRLScheduler(net, total_steps=99)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    first.step()
    second.step()
    assert lambdas(net) == [first.last_lambd] * 2
    assert second.state_dict() == first.state_dict()


def test_a_saved_state_with_a_function_as_the_ramp_asks_for_the_function():
    first = gs.GRLScheduler(reversed_net(), total_steps=10, ramp=math.sqrt, max_lambd=0.25)
    first.step()
    with pytest.raises(gs.OperatorError, match=r"this scheduler has ramp='dann'. Make it with the same function"):
        gs.GRLScheduler(reversed_net(), total_steps=99).load_state_dict(first.state_dict())
    again = gs.GRLScheduler(reversed_net(), total_steps=99, ramp=math.sqrt)
    again.load_state_dict(first.state_dict())
    assert again.last_lambd == first.last_lambd == 0.25 * math.sqrt(0.1)


def test_past_the_end_it_stays_and_says_so_once():
    net = reversed_net()
    scheduler = gs.GRLScheduler(net, total_steps=1, ramp="linear")
    scheduler.step()
    with pytest.warns(UserWarning, match="total_steps=1"):
        scheduler.step()
    scheduler.step()
    assert lambdas(net) == [1.0, 1.0]


def test_it_drives_what_it_is_given():
    net, layer = reversed_net(), gs.GradientReversal()
    one = gs.operations(net)[0].operator
    gs.GRLScheduler([one, layer], total_steps=5, ramp="linear").step()
    assert (one.lambd, layer.lambd) == (0.2, 0.2)
    assert lambdas(net) == [0.2, 1.0]
    gs.GRLScheduler(nn.Sequential(layer), total_steps=5, ramp="constant")
    assert layer.lambd == 1.0


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (reversed_net, {"total_steps": 0}, "total_steps=0"),
        (reversed_net, {"total_steps": 1.5}, "total_steps=1.5"),
        (reversed_net, {"total_steps": True}, "total_steps=True"),
        (reversed_net, {"total_steps": 5, "ramp": "dan"}, "ramp='dan'"),
        (reversed_net, {"total_steps": 5, "max_lambd": -1.0}, "lambd=-1.0"),
        (lambda: nn.Linear(1, 1), {"total_steps": 5}, "no gradient reversal"),
        (lambda: [nn.Linear(1, 1)], {"total_steps": 5}, "no gradient reversal"),
    ],
)
def test_refused(given, options, words):
    with pytest.raises(gs.OperatorError, match=words):
        gs.GRLScheduler(given(), **options)
