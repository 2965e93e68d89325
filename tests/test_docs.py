"""docs/: every Python block is executed, those of a page in order and in one namespace; every link leads somewhere."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_BLOCKS = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.usefixtures("scripting")
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name)
def test_python_blocks_run_in_order(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # they may write files
    text, namespace = page.read_text(), {"__name__": "page"}
    try:
        for found in BLOCK.finditer(text):
            line = text[: found.start()].count("\n") + 1
            # Blank lines in front, so that a traceback gives the line of the page.
            exec(compile("\n" * line + found[1], str(page), "exec"), namespace)  # a file, so that source is found
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_pages_that_have_code_are_found() -> None:
    assert {"concepts.md", "tools.md", "migration.md"} <= {page.name for page in WITH_BLOCKS}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", re.sub(r"`[^`\n]*`", "", page.read_text()))  # code may look like one
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_on_the_index() -> None:
    docs = ROOT / "docs"
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", (docs / "index.md").read_text())
    pages = {page.relative_to(docs).as_posix() for kind in ("*.md", "examples/*.md") for page in docs.glob(kind)}
    assert pages - {"index.md"} == set(listed)
