from pathlib import Path


def committed(lines):
    raise NotImplementedError


def page(path: Path) -> str:
    raise NotImplementedError
