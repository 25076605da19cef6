"""What the benchmarks compute without a clock: settings, packing, ratios, tables, refusals."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch.testing._internal.two_tensor import TwoTensor
from transformers import DynamicCache

from benchmarks import attention, baselines, decode, decode_results, static
from benchmarks.attention_candidates import (
    Candidate,
    WrongResultError,
    check,
    memory_needed,
    rotating,
)
from benchmarks.attention_results import CAT_SDPA, SDPA, Figures, Result, plot, tables
from benchmarks.decode_candidates import tolerance
from benchmarks.decode_results import Row
from benchmarks.decoding import kv_bytes, tensors_in
from benchmarks.reading import new_reader
from benchmarks.stores import Setting, Shape, new_dense, new_stores, paged_format
from benchmarks.timing import LONG_SECONDS, Timing, describe, interleave
from kvcompile.codegen.cpu.isa import detect_isa, has_integer_dot
from kvcompile.codegen.gpu.machine_code import Loop, MachineCode
from kvcompile.codegen.spec import Compute
from kvcompile.format_requests import parse_formats
from kvcompile.options import OptionError
from kvcompile.runtime.page_table import HOLE
from kvcompile.runtime.quantized_store import QuantizedStore
from tests.support.gpu_kernels import KERNELS

SMOLLM2 = Shape(9, 3, 64)
BOTH: list[Compute] = ["int8", "fp32"]


def setting(context: int = 8192, batch: int = 1) -> Setting:
    return Setting(SMOLLM2, "bf16", batch, context)


def text_of(*shown: Table) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for table in shown:
            console.print(table)
    return captured.get()


def cells(text: str, name: str) -> list[str]:
    """Return the cells of the first row that begins with a name."""
    line = next(line for line in text.splitlines() if line.startswith("│") and f" {name} " in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_shape_is_parsed() -> None:
    assert Shape.parse("32/8/128") == Shape(32, 8, 128)
    assert str(Shape.parse("9/3/64")) == "9q/3kv D64"


@pytest.mark.parametrize("text", ["9/3", "9x3x64", "9/4/64", "0/3/64", "9/3/64/1", "-9/3/64"])
def test_another_spelling_is_no_shape(text: str) -> None:
    with pytest.raises(ValueError, match="shape|share"):
        Shape.parse(text)


def test_calls_rotate_over_as_many_layers_as_make_memory_cold() -> None:
    assert setting(1024).dense_bytes == 2 * 3 * 64 * 2 * 1024
    assert setting(1024).layers == 30
    assert setting(131072).layers == 6
    assert setting(131072, batch=8).layers == 1


def test_a_format_is_laid_out_as_the_backend_does() -> None:
    exact, int4, mixed = parse_formats(["auto,int4,k8v4:residual_length=0,num_sink_tokens=0"], {})
    found = paged_format(exact, SMOLLM2, torch.bfloat16, BOTH)
    assert (found.layout.k_format, found.layout.page_size) == ("bf16", 32)
    assert found.computes == (None,)
    assert found.name(None) == "auto"
    found = paged_format(int4, SMOLLM2, torch.bfloat16, BOTH)
    assert found.layout.page_size == 64
    assert found.layout.window is not None
    assert found.layout.window.residual_length == 64
    assert found.bytes_of(setting()) < 0.3 * setting().dense_bytes
    found = paged_format(mixed, SMOLLM2, torch.bfloat16, BOTH)
    assert (found.layout.k_format, found.layout.v_format) == ("int8", "int4")


@pytest.mark.skipif(not has_integer_dot(detect_isa()), reason="no integer products")
def test_only_integers_are_computed_in_both_ways() -> None:
    int4, fp8, fixed = parse_formats(["int4,fp8,int8:compute_dtype=fp32"], {})
    found = paged_format(int4, SMOLLM2, torch.bfloat16, BOTH)
    assert found.computes == ("int8", "fp32")
    assert found.name("fp32") == "int4, compute fp32"
    assert paged_format(fp8, SMOLLM2, torch.bfloat16, BOTH).computes == ("fp32",)
    assert paged_format(fixed, SMOLLM2, torch.bfloat16, BOTH).computes == ("fp32",)
    with pytest.raises(OptionError, match="'fp8' cannot be computed in int8"):
        paged_format(fp8, SMOLLM2, torch.bfloat16, ["int8"])


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(("bits", "steps"), [(8, 255), (4, 15)])
@pytest.mark.parametrize("channels", [64, 128, 40])
def test_packed_numbers_are_within_half_a_step(
    bits: int, steps: int, per_channel: bool, channels: int
) -> None:
    x = torch.randn(2, 3, 128, channels)
    packed = baselines.quantize(x, bits, per_channel=per_channel)
    found = baselines.dequantize(packed)
    assert found.shape == x.shape
    assert packed.codes.numel() == x.numel() * bits // 8
    dim, size = (2, 64) if per_channel else (3, min(channels, 64))
    error, grouped = ((y.unflatten(dim, (-1, size))) for y in (found - x, x))
    step = (grouped.amax(dim + 1, keepdim=True) - grouped.amin(dim + 1, keepdim=True)) / steps
    assert (error.abs() <= 0.501 * step).all()
    assert packed.nbytes < x.nbytes / 2


def test_memory_grows_with_what_is_compared() -> None:
    auto, int4 = (
        paged_format(request, SMOLLM2, torch.bfloat16, BOTH)
        for request in parse_formats(["auto,int4"], {})
    )
    least = memory_needed(setting(), [], [])
    dense = 30 * setting().dense_bytes
    assert least > 3 * dense
    assert memory_needed(setting(), [auto], []) >= least + dense
    assert least < memory_needed(setting(), [int4], []) < least + 0.3 * dense
    assert least < memory_needed(setting(), [], [4]) < least + 0.3 * dense


def test_candidates_of_the_same_memory_are_kept_apart() -> None:
    visited: list[tuple[str, int]] = []

    def calls(name: str) -> list[Any]:
        return [lambda i=i: visited.append((name, i)) for i in range(9)]

    group = [Candidate(name, calls(name), 0) for name in ("a", "b", "c")]
    steps = rotating([group, [Candidate("alone", calls("alone"), 0)]])
    for _ in range(9):
        for step in steps.values():
            step()
    assert [i for name, i in visited if name == "b"] == [3, 4, 5, 6, 7, 8, 0, 1, 2]
    assert [i for name, i in visited if name == "alone"] == list(range(9))
    assert visited[:3] == [("a", 0), ("b", 3), ("c", 6)]


def test_a_wrong_result_is_refused() -> None:
    result = torch.randn(1, 2, 1, 8)
    check("right", result + 1e-4, result, 0.01)
    for wrong in (result * 1.1, result * float("nan")):
        with pytest.raises(WrongResultError, match="wrong"):
            check("wrong", wrong, result, 0.01)


def result(context: int = 8192) -> Result:
    figures = {
        SDPA: Figures(SDPA, Timing((800e-6,)), 1 << 20),
        CAT_SDPA: Figures(CAT_SDPA, Timing((1000e-6,)), 1 << 20),
        "pages int4": Figures(
            "pages int4", Timing((100e-6,)), 1 << 18, Timing((25e-6,)), "only read int4"
        ),
        "only read int4": Figures("only read int4", Timing((80e-6,)), 1 << 18),
    }
    return Result(setting(context), figures, 10e9)


@pytest.mark.parametrize("format_", ["auto", "int4"])
def test_a_reader_reads_every_page_once(format_: str) -> None:
    (request,) = parse_formats([format_], {})
    small = Setting(Shape(4, 2, 16), "bf16", 2, 200)
    paged = paged_format(request, small.shape, torch.bfloat16, ("fp32",))
    (store, *_) = new_stores(small, paged.layout, new_dense(small)[:1])
    tables = [store.pages] + ([store.exact] if isinstance(store, QuantizedStore) else [])
    words = [
        table.arena.page(page).view(torch.int64).sum()
        for table in tables
        for row in table.rows
        for page in row
        if page != HOLE
    ]
    assert len(words) > 2 * 200 // paged.layout.page_size
    assert new_reader(store)() == int(torch.stack(words).sum()) % 2**64


def test_ratios_take_the_append_into_account_where_the_baseline_appends() -> None:
    found = result()
    assert found.ratio("pages int4", SDPA) == pytest.approx(8)
    assert found.ratio("pages int4", CAT_SDPA) == pytest.approx(8)
    assert found.ratio(SDPA, CAT_SDPA) == pytest.approx(1.25)
    assert found.ratio("pages int4", "flex") is None
    assert found.stream_share("pages int4") == pytest.approx((1 << 18) / 100e-6 / 10e9)


def test_the_tables_of_attention_show_every_candidate() -> None:
    text = text_of(*tables("9q/3kv", [result(1024), result(8192)]))
    assert cells(text, "pages int4")[1:] == ["100   8.00x  26%  80%"] * 2
    assert cells(text, "only read int4")[1] == "80  10.00x  33%"
    assert cells(text, "SDPA")[1] == "800   1.00x  13%"
    assert cells(text, "1,024") == ["1,024", "pages int4", "8.00", "8.00"]
    assert tables("nothing measured", []) == []


def test_figures_are_written_and_plotted(tmp_path: Path) -> None:
    found = json.loads(json.dumps(attention.as_json([result()], {"cpu": "x"})))
    (row,) = found["results"]
    assert (row["tokens"], row["layers"], row["kv_heads"]) == (8192, 30, 3)
    assert row["candidates"][2]["append_p25_us"] == pytest.approx(25)
    assert row["candidates"][2]["over_sdpa"] == pytest.approx(8)
    plot([result(1024), result(8192)], "here", tmp_path / "attention.svg")
    assert "pages" in (tmp_path / "attention.svg").read_text()


def test_quick_is_one_setting_without_compilers() -> None:
    args, settings = attention.parse(["--quick", "--formats", "auto,int4"])
    assert list(settings) == [setting()]
    assert not attention.is_compiled(setting(), list(settings), args.compiled)
    assert attention.is_compiled(setting(), list(settings), "one")
    assert not attention.is_compiled(setting(1024), [setting(1024)], "one")
    assert attention.is_compiled(setting(1024), [setting(1024)], "all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "int5"], "did you mean 'int"),
        (["--shapes", "9/4/64"], "do not share"),
        (["--plot", "figure.exe"], "must end in one of"),
        (["--json", "/nowhere/at/all/x.json"], "no folder"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        attention.parse(arguments)
    assert message in capsys.readouterr().err


def test_candidates_take_turns_in_a_changing_order() -> None:
    seen: list[str] = []
    timings = interleave({n: functools.partial(seen.append, n) for n in "abc"}, 20, warm_up=1)
    assert seen[:3] == ["a", "b", "c"]
    turns = ["".join(seen[i : i + 3]) for i in range(3, len(seen), 3)]
    assert len(turns) == 20
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 3
    assert {len(timing.seconds) for timing in timings.values()} == {20}


def test_steps_in_a_row_are_timed_one_by_one_unless_they_are_long() -> None:
    seen: list[str] = []

    def long() -> None:
        seen.append("long")
        time.sleep(LONG_SECONDS)

    steps: dict[str, Callable[[], object]] = {
        "short": functools.partial(seen.append, "short"),
        "long": long,
    }
    timings = interleave(steps, 8, warm_up=0, in_a_row=3)
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {
        "short": 24,
        "long": 8,
    }
    runs = [(name, len(list(run))) for name, run in itertools.groupby(seen)]
    assert all(length % {"short": 3, "long": 1}[name] == 0 for name, length in runs)


def test_a_time_limit_leaves_some_turns() -> None:
    timings = interleave({"a": lambda: None}, 1000, seconds=0)
    assert len(timings["a"].seconds) == 8


def test_a_low_quantile_and_a_warning() -> None:
    assert Timing(tuple(range(1, 9))).p25 == 3
    assert "NOT QUIET" not in describe({"busy cores before": "0.05"})
    assert "NOT QUIET" in describe({"busy cores before": "1.30"})


def rows() -> list[Row]:
    times = {"eager, DynamicCache": 40.0, "inductor, StaticCache": 30.0, "kvcompile, int4": 20.0}
    errors = (None, 0.002, 0.0164)
    found = [
        Row(1024, name, Timing((ms / 1e3,)), 3 << 20, 1.5, error)
        for (name, ms), error in zip(times.items(), errors, strict=True)
    ]
    return [*found, Row(1024, "hqq", None, missing="not installed: hqq")]


def test_the_table_of_decoding_has_ratios_over_both_baselines() -> None:
    text = text_of(decode_results.table(rows()))
    row = next(line for line in text.splitlines() if "kvcompile, int4" in line)
    assert [c.strip() for c in row.strip("│").split("│")][2:] == [
        "20.00",
        "20.00",
        "50.0",
        "2.00",
        "1.50",
        "3.0",
        "0.016",
    ]
    assert "hqq: not installed: hqq" in text
    assert decode_results.ratio(rows(), rows()[3], "eager, DynamicCache") is None


def test_rows_of_decoding_are_written_and_plotted(tmp_path: Path) -> None:
    found = [row.as_json() for row in rows()]
    assert found[2]["p25_ms"] == pytest.approx(20)
    assert found[2]["kv_bytes"] == 3 << 20
    assert found[3] == {"context": 1024, "candidate": "hqq", "missing": "not installed: hqq"}
    decode_results.plot(rows(), "here", tmp_path / "decode.png")
    assert (tmp_path / "decode.png").stat().st_size > 1000


def test_fewer_bits_may_differ_more() -> None:
    allowed = [tolerance(bits) for bits in (16.0, 8.5, 6.5, 4.5, 2.5, 1.5)]
    assert allowed == sorted(allowed)
    assert allowed[-1] < 2**0.5


def test_existing_flags_of_decode_go_on_working() -> None:
    args = decode.new_parser().parse_args(
        ["--contexts", "--static", "--steps", "3", "--overhead", "--first-token", "--tiny"]
    )
    assert args.contexts == []
    assert (args.static, args.steps, args.overhead, args.first_token) == (True, 3, True, True)
    assert not args.freezing
    assert isinstance(args, argparse.Namespace)


def test_bytes_of_a_cache_count_each_storage_once() -> None:
    cache = DynamicCache()
    k, v = torch.zeros(1, 2, 10, 4), torch.zeros(1, 2, 10, 4)
    cache.update(k, v, 0)
    cache.update(k, v, 1)
    assert kv_bytes(cache) == 4 * k.nbytes
    first, second = cast("list[Any]", cache.layers)
    second.keys = first.keys[:, :1]
    assert kv_bytes(cache) == 3 * k.nbytes


def test_tensors_of_a_quantized_cache_are_found() -> None:
    """A pair of codes and a dictionary with their scales, as hqq keeps them, and a subclass."""
    codes, scale, zero = torch.zeros(8, dtype=torch.uint8), torch.zeros(2), torch.zeros(2)
    found = list(tensors_in({"_quantized_keys": (codes, {"scale": scale, "zero": [zero], "n": 3})}))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in (codes, scale, zero)]
    two = TwoTensor(codes, codes.clone())
    assert [id(tensor) for tensor in tensors_in([two])] == [id(two.a), id(two.b)]


def test_static_estimate_counts_pipes_of_the_loop() -> None:
    names = ("FADD", "HMMA.16816.F32", "LDS.128", "LOP3.LUT", "UIADD3", "BRA")
    instructions = dict(zip(names, (4, 2, 1, 3, 5, 1), strict=True))
    loop = Loop(instructions, 1.0, 0, 0, 0, 0, 0, 0, 1000)
    found = static.estimate("bf16", KERNELS["bf16"], MachineCode(80, 0, 1024, 5, loop))
    # A million tokens of 8 heads, 512 bytes each; 64 tokens per iteration of 4 warps, 528 parts.
    assert found.microseconds["bytes"] == pytest.approx((1 << 23) * 512 / 4.3e12 * 1e6)
    cycle = (1 << 23) / 64 * 4 / 528 / 1.755e9 * 1e6
    expected = {"issue": 16, "fma": 4, "mma": 12.8, "shared": 16, "alu": 6}
    for pipe, cycles in expected.items():
        assert found.microseconds[pipe] == pytest.approx(cycles * cycle)
    assert found.bound == "bytes"
    assert found.reached == pytest.approx(0.92)
    assert cells(text_of(*static.tables([found])), "bf16")[:3] == ["bf16", "512", "1.00"]
