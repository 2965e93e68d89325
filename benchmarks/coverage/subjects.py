"""All that is measured, and in which order: the smallest of every group first, then by size."""

from .building import Subject
from .transformers_models import transformers_subjects
from .vision import smp_subjects, timm_subjects, torchvision_subjects


def subjects() -> list[Subject]:
    """Every model of every library."""
    return [*transformers_subjects(), *torchvision_subjects(), *smp_subjects(), *timm_subjects()]


def ordered(found: list[Subject], sizes: dict[str, int]) -> tuple[list[Subject], list[Subject]]:
    """The smallest of every group, then the rest, each by size; what has no size yet comes where a middle one does."""
    usual = 30_000_000
    by_size = sorted(found, key=lambda subject: sizes.get(subject.key, usual))
    first: dict[tuple[str, str], str] = {}
    for subject in by_size:
        first.setdefault((subject.library, subject.group), subject.key)
    leading = set(first.values())
    return [s for s in by_size if s.key in leading], [s for s in by_size if s.key not in leading]
