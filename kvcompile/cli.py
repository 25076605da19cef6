"""The command line. `kvcompile eval MODEL` measures what a compressed cache costs in quality."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvcompile.codegen.errors import KvcompileError

if TYPE_CHECKING:
    import torch

    from kvcompile.evaluation import Quality, Schedule, Side
    from kvcompile.format_requests import FormatRequest
    from kvcompile.quality_report import QualityReport

# Torch, transformers and matplotlib are imported where they are needed: `--help` answers at once.

DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
WIDTH_OF_FILES = 140
"""Columns of a table that does not go to a terminal."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # errors stay on one line, to be searched for
)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder that from_pretrained loads, or a hub's name.")
]
Formats = Annotated[
    list[str],
    typer.Option(
        help="Formats to compare with the exact cache, separated by commas: a kv_cache_dtype "
        "(int4), one for K and one for V (kint8-vint4, in short k8v4); further options of the "
        "backend behind a colon (int4:residual_length=32,num_sink_tokens=0).",
    ),
]
Texts = Annotated[
    list[str],
    typer.Option(
        "--text",
        help="Text in UTF-8; may be repeated. 'pydoc:' is the language reference of this Python.",
    ),
]
Gguf = Annotated[str | None, typer.Option(help="GGUF file in the folder, to be dequantized.")]
Windows = Annotated[int, typer.Option(min=1, help="Windows of each text.")]
Window = Annotated[int, typer.Option(min=1, help="Tokens of a window.")]
Skip = Annotated[int, typer.Option(min=1, help="Tokens of a window that are not scored.")]
Step = Annotated[
    int,
    typer.Option(
        min=1,
        help="Tokens fed at once after the prefill: 1 decodes as a generation does, up to 16 run "
        "the same kernels and are faster, more are chunks of a prefill.",
    ),
]
Dtype = Annotated[str, typer.Option(help=f"Dtype of the weights: {', '.join(DTYPES)}.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch and the kernels.")]
InnerBackend = Annotated[
    str, typer.Option(help="Compiles the rest of the model: eager starts at once, or inductor.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Plot quality against bytes.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print a table in Markdown.")]


@app.callback()
def main() -> None:
    """A compiler for the KV cache: torch.compile(model, backend="kvcompile")."""


@app.command("eval")
def evaluate_model(  # noqa: PLR0913 - the options of a command line
    model: Model,
    formats: Formats,
    text: Texts = ["pydoc:"],  # noqa: B006 - read only, and shown by --help
    gguf: Gguf = None,
    windows: Windows = 2,
    window: Window = 2048,
    skip: Skip = 256,
    step: Step = 16,
    dtype: Dtype = "auto",
    threads: Threads = None,
    inner_backend: InnerBackend = "eager",
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: AsMarkdown = False,
) -> None:
    """Measure the quality of compressed caches: perplexity, KL and top-1 against the exact cache.

    Each window of text is prefilled up to the first scored token, and the rest is fed to the
    compiled model as given tokens, so that every scored prediction reads the cache in pages.

    Ends with status 1 if a cache was not what was asked for, such as not compressed.
    """
    requests, schedule = _check_formats(formats, inner_backend), _schedule(window, skip, step)
    contents = _read_texts(text)
    _choose("--dtype", dtype, DTYPES)
    _check_outputs(json, plot)

    progress = Console(stderr=True, highlight=False)
    with progress.status(f"loading {model}"):
        subject = _Subject(model, gguf, DTYPES[dtype], threads)
        pieces = subject.cut(contents, schedule, windows)
    results = _measure(subject, requests, pieces, schedule, progress)
    report = subject.report(results, schedule, windows, requests)
    _show(report, json, plot, markdown=markdown)
    for problem in report.problems:
        progress.print(problem, style="bold red", markup=False, soft_wrap=True)
    if report.problems:
        raise typer.Exit(1)


class _Subject:
    """A loaded model with its tokenizer."""

    def __init__(self, name: str, gguf: str | None, dtype: str, threads: int | None) -> None:
        """Load them.

        Raises:
            typer.BadParameter: They cannot be loaded.
        """
        import torch

        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            hint = "loading a model needs transformers: pip install 'kvcompile[models]'"
            raise typer.BadParameter(hint, param_hint="MODEL") from error
        logging.disable_progress_bar()
        if threads is not None:
            torch.set_num_threads(threads)
        source = {} if gguf is None else {"gguf_file": gguf}
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(name, **source)
            self.model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **source)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{name!r}: {error}", param_hint="MODEL") from error
        self.model.eval()
        self.name = Path(gguf or name).name

    def cut(
        self, texts: Mapping[str, str], schedule: Schedule, windows: int
    ) -> dict[str, list[torch.Tensor]]:
        """Return the windows of every text.

        Raises:
            typer.BadParameter: A text is too short, or a window too long for the model.
        """
        from kvcompile.texts import cut_windows

        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and schedule.window > longest:
            raise typer.BadParameter(
                f"{schedule.window} tokens are more than the {longest} positions of the model: "
                f"did you mean {longest}?",
                param_hint="--window",
            )
        pieces = {}
        for name, content in texts.items():
            ids = self.tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
            with _refusals_name("--text"):
                pieces[name] = cut_windows(
                    ids,
                    window=schedule.window,
                    count=windows,
                    bos=self.tokenizer.bos_token_id,
                    name=name,
                )
        return pieces

    def side(self, request: FormatRequest) -> Side:
        """Return a compiled side with a `DynamicCache`."""
        from transformers import DynamicCache

        from kvcompile.evaluation import compiled_side

        config, dtype = self.model.config, self.model.dtype
        with _refusals_name("MODEL"):
            return compiled_side(
                self.model,
                request.label,
                request.options,
                lambda: DynamicCache(config=config),
                formats=request.formats(dtype),
                shrinks=request.shrinks(dtype),
            )

    def report(
        self,
        results: Mapping[str, tuple[Quality, ...]],
        schedule: Schedule,
        windows: int,
        requests: Sequence[FormatRequest],
    ) -> QualityReport:
        """Return the results with all that they must be read with."""
        from kvcompile.machine import machine
        from kvcompile.quality_report import QualityReport

        options = {request.label: request.options for request in requests}
        dtype = str(self.model.dtype).removeprefix("torch.")
        return QualityReport(self.name, dtype, schedule, windows, machine(), options, results)


def _measure(
    subject: _Subject,
    requests: Sequence[FormatRequest],
    pieces: Mapping[str, list[torch.Tensor]],
    schedule: Schedule,
    console: Console,
) -> dict[str, tuple[Quality, ...]]:
    """Evaluate every text, with a bar that says what is running."""
    from kvcompile.evaluation import evaluate

    exact, *sides = [subject.side(request) for request in requests]
    parts = sum(len(windows) for windows in pieces.values()) * len(schedule.parts())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    times = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console) as progress:
        task = progress.add_task("compiling", total=parts * len(requests))
        return {
            text: tuple(
                evaluate(
                    windows,
                    exact,
                    sides,
                    schedule,
                    functools.partial(_advance, progress, task, text),
                )
            )
            for text, windows in pieces.items()
        }


def _advance(progress: Progress, task: TaskID, text: str, label: str) -> None:
    progress.update(task, advance=1, description=f"{text}, {label}")


def _show(report: QualityReport, json: Path | None, plot: Path | None, *, markdown: bool) -> None:
    """Print the table and write the files."""
    from kvcompile import quality_report

    if markdown:
        typer.echo(quality_report.markdown(report))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = max(console.width, WIDTH_OF_FILES)
        console.print(quality_report.table(report))
    if json is not None:
        json.write_text(quality_report.to_json(report) + "\n")
    if plot is not None:
        from kvcompile import quality_plot

        quality_plot.plot(report, plot)


@contextlib.contextmanager
def _refusals_name(*options: str) -> Iterator[None]:
    """Turn the project's own errors into errors of usage that name an option."""
    try:
        yield
    except KvcompileError as error:
        raise typer.BadParameter(str(error), param_hint=", ".join(options)) from error


def _check_formats(formats: Sequence[str], inner_backend: str) -> list[FormatRequest]:
    """Return a request for the exact cache, then those of the user."""
    from kvcompile.format_requests import FormatRequest, parse_formats
    from kvcompile.options import parse_options

    common = {"inner_backend": inner_backend}
    with _refusals_name("--inner-backend"):
        parse_options(common)
    with _refusals_name("--formats"):
        return [FormatRequest("exact", common), *parse_formats(formats, common)]


def _schedule(window: int, skip: int, step: int) -> Schedule:
    from kvcompile.evaluation import Schedule

    with _refusals_name("--window", "--skip", "--step"):
        return Schedule(window=window, skip=skip, step=step)


def _read_texts(sources: Sequence[str]) -> dict[str, str]:
    """Return contents by name."""
    from kvcompile.texts import TextError, read_text

    contents: dict[str, str] = {}
    with _refusals_name("--text"):
        for source in sources:
            text = read_text(source)
            if text.name in contents:
                raise TextError(f"two texts are called {text.name!r}: rename a file")
            contents[text.name] = text.content
    return contents


def _choose(option: str, value: str, allowed: Mapping[str, object]) -> None:
    if value not in allowed:
        close = difflib.get_close_matches(value, allowed, n=1, cutoff=0.4)
        nearest = f": did you mean {close[0]!r}?" if close else ""
        message = f"{value!r}{nearest} (allowed: {', '.join(allowed)})"
        raise typer.BadParameter(message, param_hint=option)


def _check_outputs(json: Path | None, plot: Path | None) -> None:
    """Refuse now what could not be written after the measurement."""
    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            message = f"there is no folder {str(path.parent)!r} for {path.name!r}"
            raise typer.BadParameter(message, param_hint=option)
    if plot is not None:
        from kvcompile.quality_plot import check_plot

        with _refusals_name("--plot"):
            check_plot(plot)
