"""examples/dann_digits.py: it runs, and it compares fairly: the parts are apart, the target's labels are not used."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dann_digits
from dann_digits import Domain

WAYS = ["source only", "same batches", "plain head", "DANN"]


@pytest.fixture(scope="module")
def domains() -> tuple[Domain, Domain]:
    return dann_digits.load()


def test_quick_run_prints_every_way_and_saves_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    monkeypatch.setattr("sys.argv", ["dann_digits.py", "--quick", "--seeds", "3", "--picture", str(picture)])
    monkeypatch.setenv("COLUMNS", "80")
    dann_digits.main()
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line[:1] == "│"]
    assert [row[1] for row in rows] == WAYS * 2
    assert [row[0] for row in rows if row[0]] == ["small CNN", "resnet10t"]
    for target, source, probe in ((float(row[2]), float(row[4]), float(row[5])) for row in rows):
        assert all(0 <= value <= 100 for value in (target, source, probe))
    gains = [float(dann[2]) - float(row[2]) for *others, dann in (rows[:4], rows[4:]) for row in others]
    assert [float(row[3]) for row in rows if row[1] != "DANN"] == pytest.approx(gains, abs=0.01)
    assert len(re.findall(r"^(?:small CNN|resnet10t): DANN over .*: [+-]\d+\.\d points$", printed, re.MULTILINE)) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert 20_000 < picture.stat().st_size < 150_000  # an empty figure of that size has 5,000


def trained(name: str, way: str, source: Domain, target: Domain, lambd: float = 0.5) -> dict[str, Tensor]:
    network = replace(dann_digits.NETWORKS[name], steps=3)
    return dann_digits.train(network, dann_digits.WAYS[way], 3, source, target, lambd, lambda: None).state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def test_parts_share_no_image(domains: tuple[Domain, Domain]) -> None:
    for domain, count in zip(domains, (5000, 1797), strict=True):
        parts = [part.x.flatten(1).numpy() for part in (domain.train, domain.validation, domain.test)]
        assert sum(map(len, parts)) == count
        # By content, so that an image that came twice would be seen too.
        seen = [{image.tobytes() for image in part} for part in parts]
        assert not any(one & other for one, other in itertools.combinations(seen, 2))


def test_parts_are_the_same_whatever_was_drawn_before() -> None:
    x, y = torch.arange(50), torch.arange(50)
    before = dann_digits.split(x, y, 0.5, 0.2)
    torch.rand(7)
    again = dann_digits.split(x, y, 0.5, 0.2)
    assert [len(part.x) for part in (before.train, before.validation, before.test)] == [25, 10, 15]
    assert torch.equal(before.test.x, again.test.x)


@pytest.mark.parametrize("way", WAYS)
def test_no_target_label_is_trained_on(domains: tuple[Domain, Domain], way: str) -> None:
    source, target = domains
    unlabelled = replace(target, train=target.train._replace(y=None))
    assert same(trained("small CNN", way, source, target), trained("small CNN", way, source, unlabelled))


def test_target_images_are_seen_in_every_way_but_source_only(domains: tuple[Domain, Domain]) -> None:
    source, target = domains
    inverted = replace(target, train=target.train._replace(x=1 - target.train.x))
    pairs = [[trained("small CNN", way, source, seen) for seen in (target, inverted)] for way in WAYS]
    assert [same(*pair) for pair in pairs] == [True, False, False, False]


@pytest.mark.parametrize("name", ["small CNN", "resnet10t"])
def test_ways_differ_in_the_gradient_of_the_head_alone(domains: tuple[Domain, Domain], name: str) -> None:
    batches = trained(name, "same batches", *domains)
    for way in ("plain head", "DANN"):
        assert same(batches, trained(name, way, *domains, lambd=0.0))
        assert not same(batches, trained(name, way, *domains))


def test_probe_tells_what_differs_and_nothing_else() -> None:
    draws = [torch.randn(1000, 8) for _ in range(4)]
    assert abs(dann_digits.probe(draws[:2], draws[2:]) - 0.5) < 0.08
    moved = [draws[1] + 3 * torch.eye(8)[0], draws[3] + 3 * torch.eye(8)[0]]
    assert dann_digits.probe([draws[0], moved[0]], [draws[2], moved[1]]) > 0.9
