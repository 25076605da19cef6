"""What `make demo` shows: a small model, unmodified and compiled, its text and its speed.

    python -m examples.demo [--context 1024] [--steps 48]

First SmolLM2-135M-Instruct answers in float32, twice: the texts are compared token by token. Then
the unmodified model, and two compiled ones with an exact and with a 4-bit cache, decode in bfloat16
after a long prompt, taking turns step by step. A table says how fast each was, what its cache
holds, and how far its predictions of a given text are from the unmodified model's.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.utils import logging

import kvcompile
from benchmarks.decoding import Decoder, kv_bytes, new_decoder, paged_decoder
from benchmarks.timing import Timing, interleave
from kvcompile.evaluation import compare
from kvcompile.machine import machine
from kvcompile.reports import collect
from tests.support.smollm2 import load_model, load_tokenizer, long_prompt

QUESTION = "Explain in three sentences why the sky is blue."
UNMODIFIED = "unmodified"
COMPILED: dict[str, dict[str, str]] = {
    "compiled, exact cache": {},
    "compiled, int4 cache": {"kv_cache_dtype": "int4"},
}
"""Options of the backend, by name of the side."""


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


@dataclass(frozen=True)
class Side:
    """One way to decode: its sequence, its times, and its distance from the unmodified model.

    Attributes:
        decoder: The sequence.
        timing: Single steps.
        kl: Mean KL(unmodified || side) of the given tokens, in nats.
    """

    decoder: Decoder
    timing: Timing
    kl: float


def decode_all(
    progress: Progress, model: PreTrainedModel, context: int, steps: int, given: int
) -> dict[str, Side]:
    """Decode after one prompt: first `given` tokens of the text, then freely and timed."""
    torch._dynamo.reset()
    prompt, text = long_prompt(context + given + 1).split([context, given + 1], dim=1)
    progress(f"prompt of {context} tokens and {given} steps, {UNMODIFIED}")
    decoders = {UNMODIFIED: new_decoder(model, model)}
    decoders[UNMODIFIED].prefill(prompt)
    expected = read(decoders[UNMODIFIED], text)
    divergences = {UNMODIFIED: 0.0}
    for name, options in COMPILED.items():
        decoders[name] = paged_decoder(model, name, options)
        progress(f"prompt and {given} steps, {name}: compiling two graphs")
        with collect() as graphs:
            decoders[name].prefill(prompt)
            found = read(decoders[name], text)
        passes = sum(graph.seconds for graph in graphs)
        progress(f"compiled, {passes:.1f} s of it in kvcompile's passes")
        divergences[name] = compare(expected, found, text[0, 1:]).kl.mean().item()
    progress(f"timing {steps} steps of each, taking turns")
    timings = interleave({name: decoder.step for name, decoder in decoders.items()}, steps)
    return {name: Side(d, timings[name], divergences[name]) for name, d in decoders.items()}


def read(decoder: Decoder, text: torch.Tensor) -> torch.Tensor:
    """Feed all but the last token of text, int64 [1, S], one by one; return logits [S - 1, V]."""
    logits = []
    for token in text[0, :-1].tolist():
        # A new tensor, as `step` makes them: with the strides of a slice it is compiled once more.
        decoder.token = torch.tensor([[token]])
        logits.append(decoder.step()[0])
    return torch.cat(logits)


def show(progress: Progress, sides: dict[str, Side], context: int, given: int) -> None:
    """Print the table."""
    table = Table(title=f"SmolLM2-135M-Instruct, bfloat16, {context} tokens of context")
    table.add_column("", no_wrap=True)
    for column in ("tokens/s", "ms per token", "faster", "KV cache", "KL"):
        table.add_column(column, justify="right")
    for name, side in sides.items():
        median = side.timing.median
        table.add_row(
            name,
            f"{1 / median:.1f}",
            f"{median * 1e3:.1f}",
            f"{sides[UNMODIFIED].timing.median / median:.2f} x",
            f"{kv_bytes(side.decoder.cache) / 2**20:.1f} MiB",
            "-" if name == UNMODIFIED else f"{side.kl:.4f}",
        )
    progress.console.print(table)
    progress.console.print(
        f"KL: mean divergence from the unmodified model over {given} tokens of text, in nats; that "
        "of the exact cache is what rounding to bfloat16 in another order makes"
    )
    for name in COMPILED:
        dense = kvcompile.memory_report(sides[name].decoder.cache).materializations
        progress.console.print(f"operators that needed a dense cache, {name}: {dense or 'none'}")
    progress.console.print(
        "medians of single steps; " + ", ".join(f"{k} {v}" for k, v in machine().items())
    )


def main(arguments: list[str]) -> int:
    """Run the demonstration; return 1 if the texts differ."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--steps", type=int, default=48, help="timed steps of each side")
    parser.add_argument("--given", type=int, default=96, help="tokens of text that KL is taken of")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of the answer")
    args = parser.parse_args(arguments)
    logging.disable_progress_bar()

    progress = Progress()
    same = answer_twice(progress, args.new_tokens)
    progress("loading the model in bfloat16")
    model = load_model(torch.bfloat16)
    sides = decode_all(progress, model, args.context, args.steps, args.given)
    show(progress, sides, args.context, args.given)
    progress("done")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
