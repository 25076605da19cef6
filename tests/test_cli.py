"""The command line as a user types it, on a model saved in a folder."""

from __future__ import annotations

import importlib
import json
import string
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Regex as TokenizerRegex
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from kvcompile.cli import app
from tests.support.compiled import exact_bytes
from tests.support.tiny_models import tiny_llama

ROOT = Path(__file__).resolve().parent.parent
TEXT = (
    "A compiler for the KV cache keeps what a decoder has seen in pages, and reads them with "
    "kernels that are printed for exactly that decoder. "
)
BOS = 1
WINDOW, SKIP = 96, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model, a tokenizer of characters, and a text."""
    place = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(place)
    letters = {c: i for i, c in enumerate(["<unk>", "<s>", *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(TokenizerRegex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    fast.save_pretrained(place)
    (place / "text.txt").write_text(TEXT * 2)
    return place


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def measure(folder: Path, *arguments: object) -> Result:
    sizes = ("--window", WINDOW, "--skip", SKIP, "--text", folder / "text.txt")
    return call("eval", folder, "--formats", "auto:page_size=64", *sizes, *arguments)


def ids_of(text: str) -> list[int]:
    return [2 + string.printable.index(c) for c in text]


@pytest.mark.usefixtures("fresh_dynamo")
def test_figures_of_a_text(folder: Path, tmp_path: Path) -> None:
    done = measure(folder, "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())
    exact, paged = found["results"]["text"]

    model, ids = tiny_llama(), ids_of(TEXT * 2)
    windows = [torch.tensor([[BOS, *ids[i * 95 : (i + 1) * 95]]]) for i in range(2)]
    with torch.no_grad():
        logits = torch.cat([model(w).logits[0, SKIP:-1] for w in windows])
    targets = torch.cat([w[0, SKIP + 1 :] for w in windows])
    expected = F.cross_entropy(logits.double(), targets).exp().item()

    for quality in (exact, paged):
        assert quality["perplexity"] == pytest.approx(expected, rel=1e-4)
        assert quality["tokens"] == 2 * (WINDOW - 1 - SKIP)
        assert quality["footprint"]["stored"] == exact_bytes(model, WINDOW - 1)
        assert quality["footprint"]["bits_per_value"] == 32
        assert quality["problems"] == []
    assert paged["kl"] < 1e-9
    assert paged["top1"] == 1
    assert found["options"]["auto:page_size=64"]["page_size"] == 64
    assert found["schedule"] == {"window": WINDOW, "skip": SKIP, "step": 16}
    for expected_text in ("auto:page_size=64", "100.00%", "32.00", "1.000", "126 tokens scored"):
        assert expected_text in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("fresh_dynamo")
def test_markdown(folder: Path) -> None:
    done = measure(folder, "--markdown", "--windows", 1, "--step", 32)
    assert done.exit_code == 0, done.output
    head, line, exact, paged, empty, caption = done.stdout.splitlines()
    assert len({row.count("|") for row in (head, line, exact, paged)}) == 1
    assert paged.startswith("| text | auto:page_size=64 | ")
    assert empty == ""
    assert "1 x 96 tokens of each text, 63 tokens scored" in caption


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_cache_that_is_not_in_pages_is_said_loudly(folder: Path, tmp_path: Path) -> None:
    torch.compiler.set_stance("force_eager")
    try:
        done = measure(folder, "--json", tmp_path / "out.json", "--markdown")
    finally:
        torch.compiler.set_stance("default")
    assert done.exit_code == 1
    assert "text, auto:page_size=64: NOT IN PAGES: 4 of 4 K and V tensors are dense" in done.stderr
    assert "- **text, exact: NOT IN PAGES" in done.stdout
    assert "auto:page_size=64 (!)" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["results"]["text"][1]["problems"]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_window_too_short_to_compress_anything_is_said_loudly(folder: Path) -> None:
    sizes = ("--windows", 1, "--window", 64, "--skip", SKIP, "--text", folder / "text.txt")
    done = call("eval", folder, "--formats", "int8", *sizes)
    assert done.exit_code == 1
    assert "text, int8: NOT COMPRESSED: " in done.stderr
    assert "no page was filled, or every layer is exempt" in done.stderr


MISTAKES = {
    "int5": (["--formats", "int5"], "--formats: format 'int5': option 'kv_cache_dtype' cannot"),
    "nearest": (["--formats", "int8:page_sise=1"], "unknown option 'page_sise': did you mean 'pa"),
    "skip": (["--skip", 8], "option 'skip' cannot be 8 with steps of 16 tokens: did you mean 16?"),
    "window": (["--window", 100], "option 'window' cannot be 100 with 256 tokens skipped: did you"),
    "windows": (["--windows", 0], "--windows"),
    "text": (["--text", "pydocs:"], "--text: cannot read 'pydocs:'"),
    "dtype": (["--dtype", "fp31"], "--dtype: 'fp31': did you mean 'fp32'?"),
    "inner": (["--inner-backend", "eagre"], "cannot be 'eagre': did you mean 'eager'?"),
    "json": (["--json", "nowhere/a.json"], "--json: there is no folder 'nowhere' for 'a.json'"),
    "plot": (["--plot", "a.gifs"], "--plot: 'a.gifs' must end in one of .eps, "),
}


@pytest.mark.parametrize(
    ("arguments", "message"), [pytest.param(*m, id=k) for k, m in MISTAKES.items()]
)
def test_mistakes_are_named_before_anything_is_loaded(arguments: list[Any], message: str) -> None:
    formats = [] if "--formats" in arguments else ["--formats", "auto"]
    done = call("eval", "no-such-model", *formats, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_model_that_is_not_there() -> None:
    done = call("eval", "no/such-model", "--formats", "auto")
    assert done.exit_code == 2
    assert "MODEL: 'no/such-model': " in done.stderr


def test_too_short_a_text(folder: Path) -> None:
    done = measure(folder, "--windows", 9)
    assert done.exit_code == 2
    assert "text has 278 tokens, enough for 2 windows of 96; 9 were asked for" in done.stderr


def test_a_window_longer_than_the_model(folder: Path) -> None:
    done = call("eval", folder, "--formats", "auto", "--window", 4000)
    assert done.exit_code == 2
    assert "4000 tokens are more than the 1024 positions of the model" in done.stderr


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    done = call("eval", "no-such-model", "--formats", "auto", "--plot", "a.png")
    assert done.exit_code == 2
    assert "pip install 'kvcompile[plots]'" in done.stderr


def test_it_is_a_module_and_a_script() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcompile", "eval", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Usage: kvcompile eval [OPTIONS]" in done.stdout
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["kvcompile"]
    module, name = script.split(":")
    assert getattr(importlib.import_module(module), name) is app


def test_help_loads_no_torch() -> None:
    heavy = "('torch', 'transformers', 'matplotlib')"
    code = f"import sys, kvcompile.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
