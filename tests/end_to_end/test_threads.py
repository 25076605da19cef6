"""Two threads on one compiled model, each with its own cache, while one of them compiles."""

import threading
from typing import Any

import pytest
import torch

from tests.support.compiled import assert_paged, compiled, exact_bytes, settings
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def both(work: Any) -> list[Any]:
    """Run `work(0)` and `work(1)` in two threads at once and return what they return."""
    results: list[Any] = [None, None]
    barrier = threading.Barrier(2)

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_two_threads_generate_with_two_caches(cache: str) -> None:
    model = tiny_llama(layers=1)
    run = compiled(model)
    arguments = settings(12) | ({} if cache == "dynamic" else {"cache_implementation": "static"})
    prompts = [prompt(40, seed=number) for number in range(2)]
    expected = [model.generate(ids, **arguments).sequences for ids in prompts]
    assert not torch.equal(*expected)
    for _ in range(2):  # neither graph is compiled at first; then both are
        found = both(lambda number: run.generate(prompts[number], **arguments))
        for number in range(2):
            assert torch.equal(found[number].sequences, expected[number])
            assert_paged(found[number].past_key_values, exact_bytes(model, 51))
