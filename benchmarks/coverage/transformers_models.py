from .building import Subject


def transformers_subjects() -> list[Subject]:
    return []
