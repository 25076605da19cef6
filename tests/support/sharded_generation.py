"""What each process of a tensor-parallel run does: generate, and write down what it saw.

    torchrun --nproc-per-node 2 -m tests.support.sharded_generation FOLDER

FOLDER holds models saved by `save_models`; every process adds `rank<n>.pt`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import kvcompile
from kvcompile.wrappers import HeadSplitError
from tests.support.compiled import compiled, count_compilations, settings
from tests.support.tiny_models import prompt, tiny_llama

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_tensor_parallel.py"
INT4 = {"kv_cache_dtype": "int4", "page_size": 16, "residual_length": 16}
REPLICATED = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise_gather_output",
    "model.layers.*.self_attn.v_proj": "colwise_gather_output",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
"""A plan that gives every process all KV heads, and its share of the query heads."""


def save_models(folder: Path) -> None:
    """Save models of one layer with two KV heads and with one."""
    for name, heads in (("two", 2), ("one", 1)):
        tiny_llama(kv_heads=heads, layers=1).save_pretrained(folder / name)


def generate(model: Any, tokens: tuple[int, int], **options: Any) -> dict[str, Any]:
    """Generate greedily by the compiled model.

    Args:
        model: A transformers decoder.
        tokens: Of the prompt, and new ones.
        **options: Of the backend.

    Returns:
        Tokens, compilations, and what the cache says of itself, with its first layer's keys.
    """
    ids = prompt(tokens[0])
    with count_compilations() as compilations:
        result = compiled(model, strict=True, **options).generate(
            ids, attention_mask=torch.ones_like(ids), **settings(tokens[1])
        )
    report = kvcompile.memory_report(result.cache)
    return {
        "tokens": result.sequences.tolist(),
        "compilations": compilations.count,
        "stored": report.stored,
        "materializations": report.materializations,
        "keys": result.cache.layers[0].keys.materialize(),
    }


def load(folder: Path, plan: Literal["auto"] | dict[str, str]) -> Any:
    """Load this process's shard of a model."""
    config = DistributedConfig(tp_plan=plan)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()


def cases(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield what each case gave, by its name."""
    yield "int4", generate(load(folder / "two", "auto"), (40, 12), **INT4)
    yield "replicated", generate(load(folder / "one", REPLICATED), (9, 4))
    try:
        generate(load(folder / "one", "auto"), (9, 4))
    except HeadSplitError as error:
        yield "split", str(error)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    runpy.run_path(str(EXAMPLE))["main"]()
    found = dict(cases(target))
    torch.save(found, target / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
