"""What every test needs before torch is imported."""

import os
import warnings
from collections.abc import Iterator

# Bit comparisons need one thread: with two, torch's own backward differs from run to run in the last bit.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test depends on a model hub, and none may wait for one: its client retries for most of a minute without a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# Random inputs that are the same in every run, and no deadline: the first call of a torch kernel is slow.
settings.register_profile("gradsurgery", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("gradsurgery")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Each test draws the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def scripting() -> Iterator[None]:
    """Let torch announce that TorchScript is deprecated, as it also does at its own first use of forward mode AD."""
    with warnings.catch_warnings():
        # By its text alone: a FutureWarning in torch 2.14, a DeprecationWarning in 2.13.
        warnings.filterwarnings("ignore", message="`torch.jit.*deprecated")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What counts references runs first: after a compilation that failed, torch goes on evaluating every frame itself.

    Each call then holds references more, and the operators copy, which is right and only slower; that they need not is
    what these files test.
    """
    items.sort(key=lambda item: item.path.name not in ("test_moved.py", "test_speed.py"))
