"""Set-up of every test: fixed seeds, clean compilers, golden files, skips by need."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

# Triton decides at its import, which torch's may be, whether kernels are interpreted.
os.environ["TRITON_INTERPRET"] = "1"

import torch

pytest.register_assert_rewrite("tests.support")

from tests.support.golden import Golden  # noqa: E402 -- its asserts are rewritten only from here on
from tests.support.smollm2 import MODEL_FOLDER  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    compiler = os.environ.get("CXX", "g++").split()[0]
    skips = {
        "compiler": (shutil.which(compiler) is None, f"no C++ compiler ({compiler})"),
        "gpu": (not torch.cuda.is_available(), "no NVIDIA GPU"),
        "model": (not MODEL_FOLDER.exists(), "no demonstration model: make model"),
    }
    for item in items:
        if "golden" in getattr(item, "fixturenames", ()):
            item.add_marker("golden")
        for name, (missing, reason) in skips.items():
            if missing and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
    # Last of all, they would keep one process busy while the others have nothing left to steal.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget every compiled graph and counter before and after the test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    path = Path(request.node.path).with_suffix(".expected")
    return Golden(path, request.node.name, update=request.config.getoption("--update-golden"))
