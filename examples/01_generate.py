"""Generate text with a compiled model: the same tokens, the cache in pages.

Uses the demonstration model if it has been fetched (`make model`), else a tiny random Llama.

    python examples/01_generate.py "a prompt"
    python examples/01_generate.py --tiny
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import kvcompile

MODEL_FOLDER = Path(__file__).parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct"


def load(*, tiny: bool) -> tuple[torch.nn.Module, AutoTokenizer | None]:
    """Return a model in float32 and its tokenizer; a random model has none."""
    if MODEL_FOLDER.exists() and not tiny:
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


def main() -> None:
    """Generate with and without the backend and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--tiny", action="store_true", help="a random model, ready in seconds")
    args = parser.parse_args()
    model, tokenizer = load(tiny=args.tiny)
    if tokenizer is None:
        ids = torch.randint(3, 256, (1, 12))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    else:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": args.prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    settings = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": 0}

    expected = model.generate(**inputs, **settings)

    compiled = torch.compile(model, backend="kvcompile")
    result = compiled.generate(**inputs, **settings, return_dict_in_generate=True)

    new_tokens = result.sequences[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(new_tokens) if tokenizer else f"tokens: {new_tokens.tolist()}")
    print(f"\nthe same tokens as the unmodified model: {torch.equal(result.sequences, expected)}")
    print(kvcompile.memory_report(result.cache))


if __name__ == "__main__":
    main()
