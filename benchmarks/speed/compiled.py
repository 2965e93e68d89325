"""One operator in compiled code, where a call takes some hundred microseconds and an operator perhaps one of them.

Two copies of one network differ by up to three hundredths for as long as their process lives: which was compiled first,
and where its memory lies. No number of rounds averages that out, so there are several processes, each of which compiles
the networks in another order, and the interval is over processes.
"""

import functools
import multiprocessing
import random
import statistics
import types
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from .operators import SIZES, Cosine, Wave, step
from .peers import LIMIT, OPERATORS, OURS, built
from .timing import in_turns, paired, prepare_process, spread

SAME = 1.01


class Reversed(nn.Module):
    """The cosine after a reversal that is written by hand: the value of ``x`` and the gradient of ``-x``."""

    def forward(self, x: Tensor) -> Tensor:
        y = -x
        y.detach().copy_(x.detach())
        return y.cos()


PLAIN = {LIMIT: Cosine, "no operator, another copy": Cosine, "by hand, in the source of the network": Reversed}
NAMES = (*PLAIN, OURS, *OPERATORS)


def compiled(
    sizes: dict[str, tuple[int, ...]] = SIZES, processes: int = 24, rounds: int = 300, names: Iterable[str] = NAMES
) -> Iterator[dict[str, Any]]:
    """A row for each operator and size: ``sin -> operator -> cos`` compiled, against the same without an operator."""
    fresh = multiprocessing.get_context("spawn")
    for size, shape in sizes.items():
        small = len(shape) == 1
        measure = functools.partial(
            measured, shape, rounds if small else rounds // 20, 10 if small else 1, tuple(names)
        )
        with ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool:
            found = list(pool.map(measure, range(processes)))
        for name in [name for name in names if name != LIMIT]:
            ratios = [each[name] for each in found]
            if refused := [error for error in ratios if isinstance(error, str)]:
                yield {"row": name, "size": size, "refused": refused[0]}
                continue
            row = {"row": name, "size": size, "against": "no operator", "processes": processes, **spread(ratios)}
            yield row | ({"target": SAME} if name == OURS else {})


def measured(
    shape: tuple[int, ...], rounds: int, repeats: int, names: tuple[str, ...], seed: int
) -> dict[str, float | str]:
    """The ratio of every network to that without an operator in this process, or the error of its compiler."""
    prepare_process()
    given, acts = torch.ones(shape), {}
    found: dict[str, float | str] = {}
    for name in random.Random(seed).sample(names, len(names)):
        network = built(LIMIT, Wave(), PLAIN[name]()) if name in PLAIN else built(name, Wave(), Cosine())
        call = functools.partial(torch.compile(_own(name), fullgraph=True, dynamic=False), network)
        try:
            call(given).sum().backward()
        except Exception as error:  # what a compiler cannot take is a result
            found[name] = type(error).__name__
            continue
        acts[name] = step(call, given)
    times = in_turns(acts, rounds, repeats, warm=5 * repeats)
    return found | {name: statistics.median(paired(times, name, LIMIT)) for name in acts}


def _call(network: nn.Module, x: Tensor) -> Tensor:
    return network(x)


def _own(name: str) -> Any:
    """A function with code of its own: Dynamo keeps what it compiled with the code, and asks one after the other."""
    return types.FunctionType(_call.__code__.replace(co_name=name), globals())
