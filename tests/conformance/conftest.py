"""The option that runs the whole matrix and writes its page."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every cell of the conformance matrix; writes its page")
