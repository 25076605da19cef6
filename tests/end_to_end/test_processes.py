"""A process that forks with compiled graphs and caches: the child goes on with both."""

import os
import signal
import time
import traceback

import pytest
import torch

from tests.support.attentions import Sdpa
from tests.support.compiled import compiled
from tests.support.programs import qkv

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SECONDS = 120


def status_of(child: int) -> int:
    """Return the exit status of a child; end it if it hangs."""
    for _ in range(SECONDS * 20):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


@torch.no_grad()
def test_a_forked_child_goes_on_with_its_parents_cache() -> None:
    if torch.get_num_threads() > 1:
        pytest.skip("PyTorch's own operators hang in a child whose parent ran several threads")
    model = Sdpa().eval()
    run = compiled(model)
    prompt, step = qkv(70), qkv(1)
    _, *past = run(*prompt)
    _, *past = run(*step, tuple(past))
    _, *dense = model(*prompt)
    _, *dense = model(*step, tuple(dense))
    child = os.fork()
    if not child:
        status = 1
        try:
            out, *_ = run(*step, tuple(past))
            torch.testing.assert_close(out, model(*step, tuple(dense))[0])
            torch.testing.assert_close(run(*prompt)[0], model(*prompt)[0])
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert status_of(child) == 0
    out, *_ = run(*step, tuple(past))
    torch.testing.assert_close(out, model(*step, tuple(dense))[0])
