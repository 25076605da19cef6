"""A whole cache in one safetensors file: pages as tensors, all else as JSON in its header."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvcompile.runtime.arena import Arena
from kvcompile.runtime.errors import CacheFileError
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.pickling import rebuild_handle
from kvcompile.runtime.store import PagedStore
from kvcompile.runtime.store_image import (
    PageNumbers,
    StoreImage,
    describe,
    in_order,
    page_tables,
    placed,
    restore,
)

HEADER = "kvcompile"
VERSION = 1

Pair = tuple[torch.Tensor | None, torch.Tensor | None]


def save_cache(cache: object, path: str | os.PathLike[str]) -> None:
    """Write the K and V of a cache to a safetensors file, as they are stored.

    Nothing is decoded: pages, sinks and ring go to the file byte for byte, pages that rows, forks
    or beams share once. Tensors that are not in pages are written as they are.

    Args:
        cache: A transformers `DynamicCache` or `StaticCache`, or a sequence of (k, v).
        path: Where to; a file of that name is replaced.

    Raises:
        CacheFileError: The cache has a state beside K and V; `torch.save` keeps that too.
    """
    writer = _Writer()
    layers = [[writer.entry(tensor) for tensor in pair] for pair in _pairs(cache)]
    writer.save(layers, path)


def load_cache(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> list[Pair]:
    """Return the K and V of each layer from a file of `save_cache`.

    In transformers they become a cache again with `DynamicCache(load_cache(path))`. Into a
    `StaticCache` they are put layer by layer, with the tokens that they hold:

        for layer, (k, v) in zip(cache.layers, load_cache(path)):
            layer.lazy_initialization(k, v)
            layer.keys, layer.values = k, v
            layer.cumulative_length.fill_(k.length)

    Args:
        path: The file.
        device: Where the pages go.

    Raises:
        CacheFileError: The file is damaged, is not one of `save_cache`, or holds records that the
            kernels of the device cannot read.
    """
    with _named_errors(path), safe_open(path, framework="pt", device=str(device)) as file:
        header = (file.metadata() or {}).get(HEADER)
        if header is None:
            raise CacheFileError(f"{os.fspath(path)} was not written by kvcompile.save_cache")
        about = json.loads(header)
        if about["version"] != VERSION:
            raise CacheFileError(
                f"{os.fspath(path)} has version {about['version']} of the format; this kvcompile "
                f"reads version {VERSION}: save the cache anew"
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        stores = _load_stores(about, tensors, torch.device(device))
        k_and_v = [[_tensor_of(e, stores, tensors) for e in pair] for pair in about["layers"]]
        return [(k, v) for k, v in k_and_v]


class _Writer:
    """What goes into one file; stores, pages and angles that are shared go once."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._stores: dict[int, int] = {}
        self._about: list[dict[str, Any]] = []
        # Keeps the pages until they are written.
        self._committed: list[PagedStore] = []
        self._pages: dict[tuple[int, str], PageNumbers] = {}
        self._angles: dict[int, torch.Tensor] = {}

    def entry(self, tensor: torch.Tensor | None) -> dict[str, Any] | None:
        """Note one K or V; return how the header names it."""
        if tensor is None:
            return None
        if not isinstance(tensor, KVTensor) or tensor.store is None or tensor.is_written:
            dense = tensor.snapshot("save_cache") if isinstance(tensor, KVTensor) else tensor
            name = f"dense.{len(self._tensors)}"
            self._tensors[name] = dense.detach().contiguous().clone()
            return {"tensor": name}
        number = self._number(tensor.store)
        about = {"store": number, "role": tensor.role, "tokens": tensor.tokens}
        return about | ({"first": tensor.first} if tensor.first else {})

    def save(self, layers: list[list[dict[str, Any] | None]], path: str | os.PathLike[str]) -> None:
        """Write the file."""
        tensors = dict(self._tensors)
        for number, pages in enumerate(self._pages.values()):
            tensors[f"pages.{number}"] = pages.stacked()
        for number, table in enumerate(self._angles.values()):
            tensors[f"angles.{number}"] = table
        about = {"version": VERSION, "layers": layers, "stores": self._about}
        save_file(tensors, path, {"format": "pt", HEADER: json.dumps(about)})

    def _number(self, store: PagedStore) -> int:
        if store.key in self._stores:
            return self._stores[store.key]
        committed = store.fork()
        self._committed.append(committed)
        symbols = [f"{store.layout.symbol}/{number}" for number in range(2)]
        keys = [
            (id(table.arena), symbol)
            for table, symbol in zip(page_tables(committed), symbols, strict=False)
        ]
        for key, table in zip(keys, page_tables(committed), strict=True):
            self._pages.setdefault(key, PageNumbers(table.arena))
        places = list(self._pages)
        angles = store.rotary_table
        if angles is not None:
            self._angles.setdefault(id(angles), angles)
        self._about.append(
            {
                "image": describe(committed, [self._pages[key] for key in keys]).as_fields(),
                "pages": [places.index(key) for key in keys],
                "angles": None if angles is None else list(self._angles).index(id(angles)),
            }
        )
        self._stores[store.key] = len(self._about) - 1
        return self._stores[store.key]


def _load_stores(
    about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> list[PagedStore]:
    """Return the stores of a file, in one arena for each size of pages."""
    arenas: dict[int, Arena] = {}
    content: dict[int, tuple[Arena, list[torch.Tensor]]] = {}
    found: list[tuple[StoreImage, Mapping[str, Any]]] = []
    for entry in about["stores"]:
        saved = StoreImage.of_fields(entry["image"])
        image = saved.for_device(device)
        found.append((image, entry))
        sizes = zip(entry["pages"], saved.layouts, saved.page_bytes, image.page_bytes, strict=True)
        for number, layout, size, new_size in sizes:
            pages = tensors[f"pages.{number}"]
            if pages.dtype != torch.uint8 or pages.shape[1:] != (size,):
                raise CacheFileError(f"pages.{number} are not pages of {layout.symbol}")
            if number not in content:
                arena = arenas.setdefault(new_size, Arena(new_size, device))
                content[number] = arena, list(in_order(pages, layout, image.layout.order))
    places = list(content)
    with placed([content[n][0] for n in places], [content[n][1] for n in places]) as ids:
        return [
            restore(
                image,
                [content[number][0] for number in entry["pages"]],
                [ids[places.index(number)] for number in entry["pages"]],
                None if entry["angles"] is None else tensors[f"angles.{entry['angles']}"].cpu(),
            )
            for image, entry in found
        ]


def _tensor_of(
    entry: Mapping[str, Any] | None,
    stores: Sequence[PagedStore],
    tensors: Mapping[str, torch.Tensor],
) -> torch.Tensor | None:
    if entry is None:
        return None
    if "tensor" in entry:
        return tensors[entry["tensor"]]
    store, first = stores[entry["store"]], entry.get("first", 0)
    return rebuild_handle(store, entry["role"], entry["tokens"], first)


def _pairs(cache: object) -> list[Pair]:
    """Return K and V of each layer; None where a layer has none yet."""
    if hasattr(cache, "self_attention_cache"):
        raise CacheFileError(
            "a cache of an encoder-decoder model was to be saved; save its two caches apart: "
            "cache.self_attention_cache and cache.cross_attention_cache"
        )
    layers = getattr(cache, "layers", None)
    if layers is None:
        if not isinstance(cache, (list, tuple)) or not all(len(pair) >= 2 for pair in cache):
            raise CacheFileError(
                f"a {type(cache).__name__} was to be saved; give a cache with layers, or (k, v)s"
            )
        if any(isinstance(pair, torch.Tensor) for pair in cache):
            raise CacheFileError(
                "a cache with K and V in one tensor was to be saved; use torch.save, which keeps "
                "it in pages as well"
            )
        return [(pair[0], pair[1]) for pair in cache]
    for number, layer in enumerate(layers):
        if getattr(layer, "is_sliding", False) or not hasattr(layer, "keys"):
            raise CacheFileError(
                f"layer {number} is a {type(layer).__name__}, which has a state beside its K and V "
                "that save_cache does not keep; use torch.save on the cache itself"
            )
    return [(layer.keys, layer.values) for layer in layers]


@contextmanager
def _named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CacheFileError(
            f"{os.fspath(path)} is not a cache that can be loaded: {error!r}; the file is "
            "truncated, damaged or foreign"
        ) from error
