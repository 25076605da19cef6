"""Generate text with a compiled model: the same tokens, the cache in pages.

Uses the demonstration model if it has been fetched (`make model`), else a tiny random Llama.

    python examples/01_generate.py ["a prompt"]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import kvcompile

MODEL_FOLDER = Path(__file__).parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct"


def load() -> tuple[torch.nn.Module, AutoTokenizer | None]:
    """Return a model in float32 and its tokenizer; a random model has none."""
    if MODEL_FOLDER.exists():
        model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(MODEL_FOLDER)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    return LlamaForCausalLM(config).eval(), None


def main(prompt: str = "Why is the sky blue?", max_new_tokens: int = 48) -> None:
    """Generate with and without the backend and compare."""
    model, tokenizer = load()
    if tokenizer is None:
        ids = torch.randint(3, 256, (1, 12))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    else:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}

    expected = model.generate(**inputs, **settings)

    compiled = torch.compile(model, backend="kvcompile")
    result = compiled.generate(**inputs, **settings, return_dict_in_generate=True)

    new_tokens = result.sequences[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(new_tokens) if tokenizer else f"tokens: {new_tokens.tolist()}")
    print(f"\nthe same tokens as the unmodified model: {torch.equal(result.sequences, expected)}")
    print(kvcompile.memory_report(result.past_key_values))


if __name__ == "__main__":
    main(*sys.argv[1:2])
