"""README.md is executed: its Python blocks in the order they stand, its one-liners each on a new model."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import gradsurgery as gs
from gradsurgery.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PRINTED = re.findall(r"^```text\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
ONE_LINERS = re.findall(r"^\| [^|]+ \| `((?:gs|twin|print)\b.*)` \|$", README, flags=re.MULTILINE)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights wherever the README asks for pretrained ones: a test may not hang on a network."""
    create_model = timm.create_model

    def random_weights(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create_model(name, pretrained=False, **kwargs)

    monkeypatch.setattr(timm, "create_model", random_weights)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """What torchrun sets up for the distributed block: a group, here of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("no_hub", "process_group")
def test_python_blocks_run_in_order_and_print_what_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # they write files
    assert len(BLOCKS) >= 6
    namespace: dict[str, Any] = {}
    for block in BLOCKS:
        line = README[: README.index(block)].count("\n")
        # Blank lines in front, so that a traceback gives the line of the README.
        exec(compile("\n" * line + block, "README.md", "exec"), namespace)
    _of_the_main_job, *printed = PRINTED
    assert printed
    out = capsys.readouterr().out
    for text in printed:
        assert text in out


@pytest.mark.parametrize("code", ONE_LINERS)
def test_one_liner(code: str) -> None:
    model = timm.create_model("resnet18")
    if code == "gs.remove(model)":
        gs.insert_grl(model, "layer3")
    scope = {"gs": gs, "torch": torch, "nn": nn, "model": model}
    exec(code, scope)
    operated = scope["twin"] if code.startswith("twin") else model
    assert bool(gs.operations(operated)) == ("insert" in code)
    if code.startswith("twin"):
        assert not gs.operations(model)
    operated(torch.randn(2, 3, 64, 64)).sum().backward()


def test_every_row_of_the_table_was_found() -> None:
    table = README[README.index("| you want |") :].split("\n\n")[0]
    assert len(ONE_LINERS) == len(table.splitlines()) - 2


def test_set_up_commands_are_two_and_run_what_they_say() -> None:
    commands = re.findall(r"^```sh\n(.*?)\n```$", README, flags=re.MULTILINE | re.DOTALL)
    main_job, tests = (command.split(" && ") for command in commands)
    assert [main_job[1], tests[1]] == ["python examples/quickstart.py", "python -m pytest"]


COMMANDS = {
    page.name: [
        line
        for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    for page in (ROOT / "README.md", ROOT / "docs" / "command-line.md")
}


@pytest.mark.usefixtures("no_hub", "scripting")
@pytest.mark.parametrize("page", COMMANDS)
def test_console_commands_run_as_written(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS[page]) >= 4
    for line in COMMANDS[page]:
        prompt, command, *arguments = shlex.split(line)
        if command == "python":
            continue  # the examples, which the next test looks at
        assert (prompt, command) == ("$", "gradsurgery")
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{line}\n{result.output}"
        assert result.stdout


def test_examples_named_are_those_that_are_there_and_tested() -> None:
    scripts = re.findall(r"^\$ python examples/(\S+)$", README, flags=re.MULTILINE)
    there = {path.name for path in (ROOT / "examples").glob("[!_]*.py")} - {"quickstart.py"}  # of the set-up
    assert len(scripts) == len(set(scripts)) and set(scripts) == there
    tested = "".join(path.read_text() for path in (ROOT / "tests").glob("test_example*.py"))
    assert all(f"import {script.removesuffix('.py')}\n" in tested for script in scripts)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
