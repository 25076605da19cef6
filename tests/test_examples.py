"""Every example runs as a user runs it, and says what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BY_TORCHRUN = {"05_tensor_parallel.py"}
"""Run by `tests/end_to_end/test_tensor_parallel.py`, with what else two processes do."""
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("[0-9]*.py") if path.name not in BY_TORCHRUN
)
ARGUMENTS = {"01_generate.py": ["--tiny"]}
PROMISES = {
    "01_generate.py": ["the same tokens as the unmodified model: True"],
    "02_plain_torch_model.py": ["the same tokens as the unmodified model: True"],
    "03_why_not_matched.py": [
        "1 of 1 attentions rewritten",
        "missed KVC",
        "strict=True: missed KVC",
    ],
}


@pytest.mark.compiler
@pytest.mark.parametrize("path", [pytest.param(p, id=p.name) for p in EXAMPLES])
def test_example(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, path, *ARGUMENTS.get(path.name, [])],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for promise in PROMISES[path.name]:
        assert promise in done.stdout
