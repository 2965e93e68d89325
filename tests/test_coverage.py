"""A slice of the coverage sweep, and the page that is made from the whole of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.coverage.measure import measure
from benchmarks.coverage.page import committed, failing, page
from benchmarks.coverage.subjects import subjects
from benchmarks.coverage.worker import Worker

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "coverage.jsonl"

NUMERIC = [
    "timm/test_resnet",
    "timm/test_vit",
    "timm/test_convnext",
    "timm/levit_128s",
    "torchvision/shufflenet_v2_x0_5",
    "torchvision/deeplabv3_mobilenet_v3_large",
    "transformers/BertForSequenceClassification",
    "transformers/MixtralForCausalLM",
    "transformers/MambaForCausalLM",
    "transformers/T5ForConditionalGeneration",
    "smp/Unet(mit_b0)",
]
META = ["timm/test_vit", "timm/test_resnet"]


@pytest.fixture(scope="module")
def known():
    return {subject.key: subject for subject in subjects()}


@pytest.fixture(scope="module")
def opened():
    """The classes that an earlier model has shown."""
    return set()


@pytest.mark.filterwarnings("ignore")  # of the libraries: the page says which versions
@pytest.mark.parametrize("key", NUMERIC)
def test_a_model_is_as_promised(known, key, opened):
    line = measure(known[key], numeric=float("inf"), done=opened)
    opened |= set(line["opened"])
    assert failing(line) == []
    assert line["kind"] == "numeric"
    assert len(line["places"]) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", META)
def test_a_model_without_values_is_as_promised(known, key):
    line = measure(known[key], numeric=0, done=set())
    assert failing(line) == []
    assert line["kind"] == "meta"


def test_a_wrong_gradient_is_found(known, monkeypatch):
    import gradsurgery as gs

    insert = gs.insert_grl
    monkeypatch.setattr(gs, "insert_grl", lambda model, at, lambd: insert(model, at, lambd * 1.001))
    line = measure(known["timm/test_resnet"], numeric=float("inf"), done=set())
    assert "gradients differ" in line["boundaries"][0]
    assert line["head"] == []


@pytest.mark.parametrize(
    ("seconds", "gigabytes", "why"), [(0.01, 16, "time: over 0.01 s"), (60, 0.001, "memory: over 0.001 GB")]
)
def test_a_model_beyond_its_bounds_is_recorded_as_not_run(seconds, gigabytes, why):
    worker = Worker(seconds, gigabytes)
    line = worker.measured("timm/test_resnet", 1e6, set(), False, 0)
    assert line["not run"] == why
    assert worker.process is None


def test_a_run_that_was_stopped_goes_on(tmp_path):
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "benchmarks.coverage", "--out", str(out), "--only", "timm/test_vit"]
    ready = [f"timm/test_vit{k}" for k in ("_relpos", 2, 3, 4)]
    out.write_text("".join(json.dumps({"key": key, "opened": {}}) + "\n" for key in ready))
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [line["key"] for line in lines] == [*ready, "timm/test_vit"]
    assert failing(lines[-1]) == []


def test_the_page_is_the_one_that_the_lines_make():
    assert (ROOT / "docs" / "coverage.md").read_text() == page(KEPT)


def test_what_is_not_run_counts_as_nothing(tmp_path):
    lines = [
        {"key": "timm/a", "kind": "numeric", "input": "64", "params": 5, "boundaries": [], "head": [], "opened": {}},
        {"key": "timm/b", "not run": "time: over 1 s"},
    ]
    kept = tmp_path / "lines.jsonl"
    kept.write_text(committed(lines, 1e6, {"timm/a": "x", "timm/b": "x", "timm/c": "y"}))
    assert "| timm | 3 | 1 of 2 | 1 | 0 | 1 | 1 | 1 of 1 (100.00%) |" in page(kept)
    assert "| timm/b | time: over 1 s |" in page(kept)
