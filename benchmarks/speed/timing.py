"""CPU time of several acts that take turns, and the ratio of two of them with its spread.

CPU time, since the machine may be shared: a process that waits for its turn does not age. One thread, so that the time
of the process is that of the work. The acts take turns, so that what slows the machine for a while slows all alike.
"""

import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Act = Callable[[], object]
Times = dict[str, list[float]]
T = TypeVar("T")


def seconds(act: Act, repeats: int = 1) -> float:
    """CPU seconds of one call, the mean of several in a row."""
    start = time.process_time()
    for _ in range(repeats):
        act()
    return (time.process_time() - start) / repeats


def in_turns(acts: Mapping[str, Act], rounds: int, repeats: int = 1, warm: int = 1) -> Times:
    """The times of every act, one of each in a round; which one begins changes from round to round."""
    for act in acts.values():
        for _ in range(warm):
            act()
    times: Times = {name: [] for name in acts}
    names = list(acts)
    for index in range(rounds):
        for k in range(len(names)):
            name = names[(index + k) % len(names)]
            times[name].append(seconds(acts[name], repeats))
    return times


def ratio(times: Times, of: str, to: str) -> dict[str, float]:
    """The ratio of two medians and its 95% interval, by bootstrap over the rounds."""
    pairs = list(zip(times[of], times[to], strict=True))

    def medians(sample: Sequence[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in sample) / statistics.median(b for _, b in sample)

    return _with_interval(medians, pairs)


def paired(times: Times, of: str, to: str) -> list[float]:
    """The ratio in each round: what slows the machine for a round slows both alike."""
    return [a / b for a, b in zip(times[of], times[to], strict=True)]


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """The mean of the ratios of several processes and its 95% interval, by bootstrap over the processes."""
    return _with_interval(statistics.fmean, ratios)


def _with_interval(middle: Callable[[Sequence[T]], float], sample: Sequence[T], draws: int = 2000) -> dict[str, float]:
    draw = random.Random(0)
    drawn = sorted(middle(draw.choices(sample, k=len(sample))) for _ in range(draws))
    return {"ratio": middle(sample), "low": drawn[int(0.025 * draws)], "high": drawn[int(0.975 * draws)]}


def memory(act: Act) -> tuple[int, int]:
    """Bytes of torch's allocator in an act, beyond those at its start: the most at once, and those left at its end."""
    _allocated(act)  # the profiler does not count the release of what was allocated before it first ran
    return _allocated(act)


def _allocated(act: Act) -> tuple[int, int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = act()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del result
    return most, now


def prepare_process() -> None:
    """One thread for torch and for the code that it compiles, and no word of the compilers: once in every process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
