"""`docs/models.md` from the results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from benchmarks.zoo.results import Record
from benchmarks.zoo.verdict import Verdict, causes, verdict

_TITLES = {
    "decoder": "Decoders",
    "encoder-decoder": "Encoder-decoders",
    "multimodal": "Models of text and images or sound",
}

_HEAD = """\
# Models

`python -m benchmarks.zoo` writes this page. For each class of transformers' tables of causal,
sequence-to-sequence and multimodal language models it builds a tiny model with random weights, with
one general rule (`benchmarks/zoo/sizes.py`) and what single classes need besides
(`benchmarks/zoo/exceptions.py`); generates greedily, as the model is; and again with
`torch.compile(model, backend="kvcompile")`. A prompt of 20 tokens and 12 new ones exceed a sliding
window of 24. Batch 1, float32, the cache that the model makes by itself. The inner backend is
`eager`, so that Inductor costs nothing: what is told here is what becomes of the cache, not speed.

```
python -m benchmarks.zoo                            everything, anew
python -m benchmarks.zoo --resume                   what has no result yet
python -m benchmarks.zoo --only Gemma2ForCausalLM   some classes again
python -m benchmarks.zoo --jobs 8                   processes at once
```

Every class runs in a process of its own, with a limit of time. Counted is every class whose
unmodified model generates. *Rewritten* means: every K and V of the cache is a handle on pages after
generation, no operator needed it dense, the tokens are those of the unmodified model, and no logit
differs by more than 1/1000 of the largest. *Partly* means that some are; *dense* that none is: the
model runs as it was written. *No K and V* are models whose state has one size for ever.
"""

_COLUMNS = (
    "| class | result | attentions | kinds | cache | formats | compilations | codes |",
    "|---|---|---|---|---|---|---|---|",
)


def render(records: Iterable[Record], names: Iterable[str]) -> str:
    """Return the document.

    Args:
        records: Results.
        names: All classes that are asked for.
    """
    found = sorted(records, key=lambda r: r["name"].lower())
    runs = [r for r in found if verdict(r) != "does not run"]
    lines = [_HEAD, *_summary(found), "", *_causes(runs)]
    for family, title in _TITLES.items():
        rows = [_row(r) for r in runs if r["family"] == family]
        if rows:
            lines += ["", f"## {title}", "", *_COLUMNS, *rows]
    lines += ["", *_left_out([r for r in found if verdict(r) == "does not run"])]
    missing = sorted(set(names) - {r["name"] for r in found}, key=str.lower)
    if missing:
        lines += ["", "## Not run yet", "", ", ".join(missing)]
    return "\n".join(lines).rstrip() + "\n"


def _summary(records: list[Record]) -> list[str]:
    """Count results by family."""
    kinds: tuple[Verdict, ...] = ("rewritten", "partly", "dense", "no K and V", "wrong")
    lines = [
        "## How many",
        "",
        f"| | classes | {' | '.join(kinds)} |",
        "|---|---|" + "---|" * len(kinds),
    ]
    for family, title in _TITLES.items():
        counts = Counter(verdict(r) for r in records if r["family"] == family)
        total = sum(counts[kind] for kind in kinds)
        if total:
            lines.append(
                f"| {title} | {total} | {' | '.join(str(counts[kind]) for kind in kinds)} |"
            )
    return lines


def _causes(records: list[Record]) -> list[str]:
    """Count causes; a class with several counts under each."""
    named: dict[tuple[str, str], list[str]] = defaultdict(list)
    alone: Counter[tuple[str, str]] = Counter()
    for record in records:
        found = causes(record)
        for cause in found:
            named[cause].append(record["name"])
        if len(found) == 1:
            alone[found[0]] += 1
    lines = [
        "## Why not",
        "",
        "A class with several causes counts under each; *alone* counts those with no other.",
        "",
        "| classes | alone | code | cause | which |",
        "|---|---|---|---|---|",
    ]
    for cause, names in sorted(named.items(), key=lambda item: (-len(item[1]), item[0])):
        code, reason = cause
        short = ", ".join(_short(name) for name in names)
        lines.append(f"| {len(names)} | {alone[cause]} | {code} | {_cell(reason)} | {short} |")
    return lines


def _row(record: Record) -> str:
    run = record["runs"]["auto"]
    sites = run["sites"]
    rewritten = sum(bool(site["rewritten"]) for site in sites)
    kinds = Counter(
        f"{site['pattern']}, mask {site['mask']}, {site['state'] or '-'}" for site in sites
    )
    layers: Counter[str] = Counter(record["layers"])
    formats = [
        name + ("" if all(s["handle"] for s in other.get("states", ())) else "*")
        for name, other in record["runs"].items()
        if "error" not in other
    ]
    codes = dict.fromkeys(code for code, _ in causes(record) if code)
    cells = (
        record["name"],
        verdict(record),
        f"{rewritten} of {len(sites)}",
        "; ".join(kinds),
        ", ".join(f"{count} {_kind(name)}" for name, count in layers.items()),
        ", ".join(formats),
        str(run["graphs"]),
        ", ".join(codes),
    )
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _left_out(records: list[Record]) -> list[str]:
    """Name the classes that are not counted, because they do not generate unmodified."""
    lines = ["## Not counted", "", "Their unmodified model does not generate here.", ""]
    lines += ["| class | why |", "|---|---|"]
    return lines + [f"| {r['name']} | {_cell(causes(r)[0][1])} |" for r in records]


def _kind(name: str) -> str:
    return name.removesuffix("Layer").removesuffix("Cache").removeprefix("Dynamic") or "full"


def _short(name: str) -> str:
    for ending in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"):
        name = name.removesuffix(ending)
    return name


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
