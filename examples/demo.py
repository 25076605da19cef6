"""What `make demo` shows: a small model, unmodified and compiled, its text and its speed.

    python -m examples.demo [--context 1024] [--steps 48]

First SmolLM2-135M-Instruct answers in float32, twice: the texts are compared token by token. Then
both sides decode in bfloat16 after a long prompt, taking turns step by step, and a table says how
fast each was and what its cache holds.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.utils import logging

import kvcompile
from benchmarks.decoding import Decoder, Timing, interleave, kv_bytes, machine, new_decoder
from kvcompile.reports import collect
from tests.support.smollm2 import load_model, load_tokenizer, long_prompt

QUESTION = "Explain in three sentences why the sky is blue."


class Progress:
    """Prints each step of the demonstration with the time since its start."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.start = time.perf_counter()

    def __call__(self, text: str) -> None:
        """Print one line."""
        self.console.print(f"[{time.perf_counter() - self.start:5.0f} s] {text}", markup=False)


def answer_twice(progress: Progress, new_tokens: int) -> bool:
    """Generate an answer unmodified and compiled, print it, return whether they are the same."""
    progress("loading SmolLM2-135M-Instruct in float32")
    model, tokenizer = load_model(torch.float32), load_tokenizer()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    settings = {"max_new_tokens": new_tokens, "do_sample": False}

    progress(f"generating {new_tokens} tokens, unmodified")
    expected = model.generate(**inputs, **settings)  # type: ignore[operator]

    progress("the same with torch.compile(model, backend='kvcompile'): compiling two graphs")
    compiled = torch.compile(model, backend="kvcompile")
    found = compiled.generate(**inputs, **settings)  # type: ignore[operator]

    same = torch.equal(found, expected)
    text = tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    progress(f"the texts are {'identical' if same else 'DIFFERENT'}, token by token:")
    progress.console.print(f"\n  {QUESTION}\n\n  {text}\n", markup=False)
    return same


def decode_both(
    progress: Progress, model: PreTrainedModel, context: int, steps: int
) -> tuple[dict[str, Decoder], dict[str, Timing]]:
    """Decode unmodified and compiled after one prompt; return both sides and their times."""
    ids = long_prompt(context)
    torch._dynamo.reset()
    sides = {
        "unmodified": new_decoder(model, model),
        "compiled": new_decoder(model, torch.compile(model, backend="kvcompile")),
    }
    progress(f"prompt of {context} tokens, unmodified")
    sides["unmodified"].prefill(ids)
    progress("prompt and first step, compiled: compiling two graphs")
    with collect() as graphs:
        start = time.perf_counter()
        sides["compiled"].prefill(ids)
        sides["compiled"].step()
        seconds = time.perf_counter() - start
    passes = sum(graph.seconds for graph in graphs)
    progress(f"compiled in {seconds:.1f} s, {passes:.1f} s of it in kvcompile's passes")
    sides["unmodified"].step()
    progress(f"timing {steps} steps of each, taking turns")
    return sides, interleave({name: side.step for name, side in sides.items()}, steps)


def show(
    progress: Progress, sides: dict[str, Decoder], timings: dict[str, Timing], context: int
) -> None:
    """Print the table."""
    table = Table(title=f"SmolLM2-135M-Instruct, bfloat16, {context} tokens of context")
    table.add_column("")
    for column in ("tokens/s", "ms per token", "faster", "KV cache"):
        table.add_column(column, justify="right")
    for name, side in sides.items():
        median = timings[name].median
        table.add_row(
            name,
            f"{1 / median:.1f}",
            f"{median * 1e3:.1f}",
            f"{timings['unmodified'].median / median:.2f} x",
            f"{kv_bytes(side.cache) / 2**20:.1f} MiB",
        )
    progress.console.print(table)
    dense = kvcompile.memory_report(sides["compiled"].cache).materializations
    progress.console.print(
        f"operators that needed the compiled side's cache dense: {dense or 'none'}"
    )
    progress.console.print(
        "medians of single steps; " + ", ".join(f"{k} {v}" for k, v in machine().items())
    )


def main(arguments: list[str]) -> int:
    """Run the demonstration; return 1 if the texts differ."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--steps", type=int, default=48, help="timed steps of each side")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of the answer")
    args = parser.parse_args(arguments)
    logging.disable_progress_bar()

    progress = Progress()
    same = answer_twice(progress, args.new_tokens)
    progress("loading the model in bfloat16")
    model = load_model(torch.bfloat16)
    sides, timings = decode_both(progress, model, args.context, args.steps)
    show(progress, sides, timings, args.context)
    progress("done")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
