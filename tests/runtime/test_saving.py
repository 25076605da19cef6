"""Caches in files and in pickles come back byte for byte, and share what they shared."""

from __future__ import annotations

import gc
import io
import json
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch

import kvcompile
from kvcompile.runtime.claim import claim
from kvcompile.runtime.errors import CacheFileError
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.pickling import rebuild_arenas, rebuild_handle, rebuild_store
from kvcompile.runtime.report import memory_report
from kvcompile.runtime.store import PagedStore
from kvcompile.runtime.store_image import describe, numbers_of, page_tables
from tests.support.stores import PAGE, Filled, filled_store, new_tokens, push

LENGTH = 3 * PAGE + 5


def through_pickle(pairs: Any, _: Path) -> Any:
    return pickle.loads(pickle.dumps(pairs))


def to_another_process(pairs: Any, _: Path) -> Any:
    """As queues and pipes send it: nothing may lie in memory that is shared and then dropped."""
    sent = bytes(ForkingPickler.dumps(pairs))
    gc.collect()
    return pickle.loads(sent)


def through_torch(pairs: Any, path: Path) -> Any:
    torch.save(pairs, path)
    return torch.load(path, weights_only=True)


def through_safetensors(pairs: Any, path: Path) -> Any:
    kvcompile.save_cache(pairs, path)
    return kvcompile.load_cache(path)


WAYS: list[Callable[[Any, Path], Any]] = [
    through_pickle,
    to_another_process,
    through_torch,
    through_safetensors,
]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@pytest.fixture(
    params=[(False, None), (True, None), (False, 80), (True, 80)],
    ids=["exact", "quantized", "exact static", "quantized static"],
)
def case(request: pytest.FixtureRequest) -> Filled:
    quantized, capacity = request.param
    return filled_store(LENGTH, batch=3, capacity=capacity, quantized=quantized, starts=(0, 2, 21))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def content(store: PagedStore) -> list[list[list[bytes]]]:
    """Return the bytes of every page of every row."""
    return [
        [[bytes(table.arena.page(page).tolist()) for page in row] for row in table.rows]
        for table in page_tables(store.fork())
    ]


def store_of(handle: Any) -> PagedStore:
    assert isinstance(handle, KVTensor)
    assert handle.store is not None
    return handle.store


@each_way
def test_every_byte_comes_back(case: Filled, path: Path, way: Any) -> None:
    rows = case.k[[0, 2, 2, 1]], case.v[[0, 2, 2, 1]]
    (k, v), (again, _) = way([rows, (case.k, case.v)], path)
    store, saved = store_of(k), store_of(rows[0])
    assert store is store_of(v) is claim(k, v)
    assert content(store) == content(saved)
    assert store.start_list() == [0, 21, 21, 2]
    assert (store.compute, store.kind) == (saved.compute, saved.kind)
    # Rows that share pages share them again, and layers share arenas.
    assert memory_report([k]).stored == memory_report([rows[0]]).stored
    assert store_of(again).arena is store.arena
    assert torch.equal(again.materialize(), case.dense_k)
    assert not case.store.materializations
    new = new_tokens(4, 2 * PAGE)[0][:, :, :20], new_tokens(4, 20)[1]
    for each in (store, saved):
        push(each, *new)
    assert content(store) == content(saved)


@each_way
def test_crops_written_handles_and_dense_tensors(case: Filled, path: Path, way: Any) -> None:
    dense = torch.randn(2, 2, 3, 4)
    written = case.k.clone().fill_(1.0)
    if case.store.capacity is None:
        case.k = case.k[:, :, :PAGE]
        case.dense_k = case.dense_k[:, :, :PAGE]
    (k, v), (one, two) = way([(case.k, case.v), (written, dense)], path)
    assert torch.equal(k.materialize(), case.dense_k)
    assert torch.equal(v.materialize(), case.dense_v)
    assert type(one) is type(two) is torch.Tensor
    assert torch.equal(one, torch.ones_like(one))
    assert torch.equal(two, dense)


def test_pages_that_caches_share_are_in_a_safetensors_file_once(case: Filled, path: Path) -> None:
    kvcompile.save_cache([(case.k, case.v)], path)
    one = path.stat().st_size
    fork = case.k.clone(), case.v.clone()
    kvcompile.save_cache([(case.k, case.v), fork, fork], path)
    assert path.stat().st_size - one < 3000
    loaded = kvcompile.load_cache(path)
    assert memory_report(loaded).stored == memory_report([case.k]).stored


@pytest.mark.parametrize("quantized", [False, True])
def test_records_in_another_order(
    quantized: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = filled_store(LENGTH, quantized=quantized)
    for way in (through_torch, through_safetensors):
        with monkeypatch.context() as patch:
            patch.setenv("KVCOMPILE_TARGET", "gpu")
            ((k, v),) = way([(case.k, case.v)], path)
            kvcompile.save_cache([(k, v)], path) if way is through_safetensors else torch.save(
                [(k, v)], path
            )
        assert store_of(k).layout.order == "gpu16"
        load = kvcompile.load_cache if way is through_safetensors else torch.load
        ((k, v),) = cast("Any", load(path))
        assert store_of(k).layout == case.store.layout
        # The bits of every number: bytes that hold none are not kept.
        assert torch.equal(k.materialize(), case.dense_k)
        assert torch.equal(v.materialize(), case.dense_v)


class TestDamage:
    """Named errors."""

    def test_a_truncated_file(self, case: Filled, path: Path) -> None:
        kvcompile.save_cache([(case.k, case.v)], path)
        whole = path.read_bytes()
        for size in (0, 5, 200, len(whole) - 100):
            path.write_bytes(whole[:size])
            with pytest.raises(CacheFileError, match="truncated"):
                kvcompile.load_cache(path)

    def test_a_foreign_file(self, path: Path) -> None:
        safetensors.torch.save_file({"k": torch.ones(2)}, path)
        with pytest.raises(CacheFileError, match="not written by kvcompile"):
            kvcompile.load_cache(path)
        with pytest.raises(FileNotFoundError):
            kvcompile.load_cache(path.with_name("missing"))

    @pytest.mark.parametrize(
        "damage",
        [
            lambda about: about.update(version=99),
            lambda about: about.pop("stores"),
            lambda about: about["layers"][0][0].update(tokens=99),
            lambda about: about["layers"][0][0].update(store=7),
            lambda about: about["stores"][0]["image"].update(k_len=2),
            lambda about: about["stores"][0]["image"].update(num_kv_heads=3),
            lambda about: about["stores"][0]["image"].update(compute="fp2"),
            lambda about: about["stores"][0]["image"].update(starts=[0, 50]),
            lambda about: about["stores"][0]["image"]["layout"].update(k_format="int5"),
            lambda about: about["stores"][0]["image"]["layout"].update(more=1),
            lambda about: about["stores"][0]["image"]["tables"][0][0].__setitem__(0, 400),
            lambda about: about["stores"][0].update(pages=[]),
        ],
    )
    def test_a_damaged_header(self, damage: Callable[[Any], Any], path: Path) -> None:
        case = filled_store(LENGTH, quantized=True)
        kvcompile.save_cache([(case.k, case.v)], path)
        with safetensors.safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["kvcompile"])
        damage(about)
        tensors = safetensors.torch.load_file(path)
        safetensors.torch.save_file(tensors, path, {"kvcompile": json.dumps(about)})
        with pytest.raises(CacheFileError):
            kvcompile.load_cache(path)

    def test_a_damaged_pickle(self, case: Filled) -> None:
        fork = case.store.fork()
        numbers = numbers_of(fork)
        fields = describe(fork, numbers).as_fields()
        pages = [number.stacked() for number in numbers]
        with pytest.raises(CacheFileError, match="not those of"):
            rebuild_store(fields, [page[:, :-1] for page in pages], [], None)
        with pytest.raises(CacheFileError, match="cannot be read"):
            rebuild_store(fields | {"starts": [0, "a"]}, pages, [], None)
        with pytest.raises(CacheFileError, match="angles"):
            rebuild_store(fields, pages, [rebuild_arenas() for _ in pages], torch.ones(3))
        with pytest.raises(CacheFileError, match="names no store"):
            rebuild_handle(None, "k", 3)

    def test_what_has_more_than_k_and_v(self, path: Path) -> None:
        from transformers import DynamicCache, EncoderDecoderCache, MistralConfig

        with pytest.raises(CacheFileError, match="save its two caches apart"):
            kvcompile.save_cache(EncoderDecoderCache(DynamicCache(), DynamicCache()), path)
        sliding = DynamicCache(config=MistralConfig(sliding_window=8, num_hidden_layers=1))
        with pytest.raises(CacheFileError, match="torch.save on the cache itself"):
            kvcompile.save_cache(sliding, path)
        with pytest.raises(CacheFileError, match="a str was to be saved"):
            kvcompile.save_cache("cache", path)


def test_layers_without_anything_yet(path: Path) -> None:
    from transformers import DynamicCache, LlamaConfig

    cache = DynamicCache(config=LlamaConfig(num_hidden_layers=2))
    kvcompile.save_cache(cache, path)
    assert kvcompile.load_cache(path) == [(None, None)] * 2


def test_a_file_object(case: Filled) -> None:
    file = io.BytesIO()
    torch.save({"k": case.k}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["k"]
    assert isinstance(loaded, KVTensor)
    assert torch.equal(loaded.materialize(), case.dense_k)
