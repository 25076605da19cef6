"""The demonstration model, where it has been fetched (`make model`)."""

import functools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

MODEL_FOLDER = Path(__file__).parents[2] / ".cache" / "models" / "SmolLM2-135M-Instruct"


def load_model(dtype: torch.dtype, **kwargs: object) -> PreTrainedModel:
    """Return SmolLM2-135M-Instruct: 30 layers, 9 query heads, 3 KV heads, head dimension 64.

    Args:
        dtype: The dtype of the weights.
        **kwargs: Passed to `from_pretrained`.

    Raises:
        OSError: The model has not been fetched.
    """
    model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=dtype, **kwargs)
    assert isinstance(model, PreTrainedModel)
    torch.nn.Module.eval(model)
    return model


@functools.cache
def load_tokenizer() -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, padding on the left as `generate` wants it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER, padding_side="left")
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


@functools.cache
def long_text() -> str:
    """Return about 150 thousand tokens of English that every Python carries: its reference."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def long_prompt(tokens: int) -> torch.Tensor:
    """Return the first `tokens` tokens of `long_text()`, int64 [1, tokens]."""
    text = long_text()[: tokens * 8]
    ids = load_tokenizer()(text, return_tensors="pt")["input_ids"]
    assert isinstance(ids, torch.Tensor)
    assert ids.shape[1] >= tokens
    return ids[:, :tokens]
