"""Decoding step by step: what the demonstration and the benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

import kvcompile
from kvcompile.calling import isolated


@dataclass
class Decoder:
    """One sequence being decoded greedily.

    Attributes:
        run: The model or a compiled wrapper of it.
        cache: The cache that grows.
        token: The last token, int64 [1, 1]; not in the cache yet.
        prefill_seconds: Time of the whole prefill, compilation included.
    """

    run: Any
    cache: Cache
    token: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.int64))
    prefill_seconds: float = 0.0

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor, *, chunk: int | None = None) -> None:
        """Feed a prompt, int64 [1, S]; `chunk` tokens at a time, which bounds the memory."""
        start = time.perf_counter()
        for part in ids.split(chunk or ids.shape[1], dim=1):
            logits = self.run(part, cache=self.cache, logits_to_keep=1).logits
        self.token = logits[:, -1:].argmax(-1)
        self.prefill_seconds = time.perf_counter() - start

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Decode one token; return its logits [1, 1, vocabulary]."""
        logits = self.run(self.token, cache=self.cache, logits_to_keep=1).logits
        self.token = logits.argmax(-1)
        assert isinstance(logits, torch.Tensor)
        return logits


def new_decoder(model: PreTrainedModel, run: Any) -> Decoder:
    """Return a decoder with an empty `DynamicCache`."""
    return Decoder(run, DynamicCache(config=model.config))


def paged_decoder(model: PreTrainedModel, name: str, options: Mapping[str, Any]) -> Decoder:
    """Return a decoder whose `DynamicCache` lies in kvcompile's pages.

    Args:
        model: Left as it is; other wrappers of it are compiled apart.
        name: What its code is called in Dynamo's logs.
        options: Options of the backend.
    """
    run = torch.compile(isolated(model, name), backend="kvcompile", options=dict(options))
    return new_decoder(model, run)


def kv_bytes(cache: Cache) -> int:
    """Return the bytes a cache holds: of its pages, or of all tensors of its layers."""
    if paged := int(kvcompile.memory_report(cache).allocated):
        return paged
    tensors = [tensor for layer in cache.layers for tensor in tensors_in(vars(layer))]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in containers, and those that tensors of other classes consist of."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, torch.Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
        else:
            yield from tensors_in([getattr(value, name) for name in flatten()[0]])
