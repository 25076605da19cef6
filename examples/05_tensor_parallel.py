"""Tensor parallel: each process keeps the pages of its own KV heads.

Transformers shards the model; nothing else differs from one process. A tiny random Llama stands
for yours: the heads of K and V are divided among the processes, so two of them here.

    torchrun --nproc-per-node 2 examples/05_tensor_parallel.py
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import kvcompile


def tiny() -> LlamaForCausalLM:
    """Return the whole model, the same one in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        initializer_range=0.25,
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    """Generate by the whole model and by this process's shard of it, and compare."""
    whole = tiny()
    ids = torch.arange(3, 15)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    settings = {
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    expected = whole.generate(**inputs, **settings)
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_plan="auto")
        ).eval()

    compiled = torch.compile(model, backend="kvcompile", options={"inner_backend": "eager"})
    result = compiled.generate(**inputs, **settings)

    same = torch.equal(result.sequences, expected.sequences)
    report = kvcompile.memory_report(result.cache)
    dense = sum(x.nbytes for layer in expected.cache.layers for x in (layer.keys, layer.values))
    print(
        f"process {dist.get_rank()}: the same tokens as one process: {same}\n"
        f"process {dist.get_rank()}: {report.stored} of {dense} bytes of K and V in pages, "
        f"made dense: {report.materializations or 'nothing'}\n",
        end="",
        flush=True,
    )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
