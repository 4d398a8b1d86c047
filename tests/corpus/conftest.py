"""The process that examines programs."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process that trains nothing itself: each search and each lone trial is a child of it, with globals anew."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool
