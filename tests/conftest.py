"""Fixtures that several test files share."""

import warnings

import pytest


@pytest.fixture
def scripting():
    """Let torch announce that TorchScript is deprecated, as it also does at its own first use of forward mode AD."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.*deprecated", category=FutureWarning)
        yield
