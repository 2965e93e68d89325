"""The option that runs the whole matrix, which writes its page."""

import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
VERDICTS: pytest.StashKey[dict[object, object]] = pytest.StashKey()
BEGUN: pytest.StashKey[float] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every cell of the conformance matrix; writes its page")

    parser.addoption("--minutes", type=float, default=float("inf"), help="leave out what is not begun by then")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        from .matrix import chosen_cells, every_cell

        whole = metafunc.config.getoption("--whole", default=False)
        metafunc.parametrize("cell", every_cell() if whole else list(chosen_cells()), ids=str)


@pytest.fixture
def verdicts(request: pytest.FixtureRequest) -> dict[object, object]:
    """What the cells of this run turned out to be."""
    request.config.stash.setdefault(BEGUN, time.monotonic())
    return request.config.stash.setdefault(VERDICTS, {})


@pytest.fixture
def in_time(request: pytest.FixtureRequest, verdicts: object) -> bool:
    minutes: float = request.config.getoption("--minutes", default=float("inf"))
    return time.monotonic() - request.config.stash[BEGUN] < 60 * minutes


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = session.config.stash.get(VERDICTS, {})
    if not session.config.getoption("--whole", default=False):
        return
    from .matrix import every_cell, page

    if set(found) == set(every_cell()):
        minutes = (time.monotonic() - session.config.stash[BEGUN]) / 60
        PAGE.write_text(page(found, minutes))  # type: ignore[arg-type]
