"""A model that transformers has sharded over two processes, each with its own KV heads."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.compiled import exact_bytes, settings
from tests.support.sharded_generation import INT4, generate, save_models
from tests.support.tiny_models import prompt, tiny_llama

SECONDS = 240
"""Far more than it takes; processes that wait for each other wait for ever."""


@dataclass
class Run:
    """What two processes printed together, and what each of them found."""

    output: str
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the example and the cases by torchrun, once: most of the time goes into starting."""
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    program = ["-m", "tests.support.sharded_generation", str(folder)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with subprocess.Popen(
        [*torchrun, "--nproc-per-node", "2", *program],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its processes
            output, _ = process.communicate()
    assert process.returncode == 0, output
    return Run(output, [torch.load(folder / f"rank{n}.pt") for n in range(2)])


def test_the_example_has_the_tokens_of_one_process_from_half_the_cache(run: Run) -> None:
    for rank in range(2):
        assert f"process {rank}: the same tokens as one process: True" in run.output
        pages = f"process {rank}: 2432 of 4864 bytes of K and V in pages, made dense: nothing"
        assert pages in run.output


def test_int4_heads_decode_to_what_they_are_in_one_process(run: Run) -> None:
    model = tiny_llama(layers=1)
    expected = generate(model, (40, 12), **INT4)
    for rank in run.ranks:
        found = rank["int4"]
        assert found["tokens"] == expected["tokens"]
        assert found["stored"] == expected["stored"] // 2 < exact_bytes(model, 51) // 2
        assert found["materializations"] == {}
        assert found["compilations"] == 2
    # A product of half a matrix may round otherwise, far below a step of int4.
    keys = torch.cat([rank["int4"]["keys"] for rank in run.ranks], dim=1)
    torch.testing.assert_close(keys, expected["keys"], rtol=0, atol=1e-4)


def test_one_kv_head_is_given_to_both(run: Run) -> None:
    model, ids = tiny_llama(kv_heads=1, layers=1), prompt(9)
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **settings(4)).sequences
    for rank in run.ranks:
        found = rank["replicated"]
        assert found["tokens"] == expected.tolist()
        assert found["stored"] == exact_bytes(model, 12)
        assert found["materializations"] == {}


def test_half_a_kv_head_is_an_error_with_a_name(run: Run) -> None:
    for rank in run.ranks:
        assert "2 processes, which 1 KV head cannot be divided among" in rank["split"]
        assert "colwise_gather_output" in rank["split"]
