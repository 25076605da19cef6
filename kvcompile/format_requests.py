"""Formats as a command line asks for them: `int8,k8v4,int4:residual_length=32`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.options import OptionError, parse_options
from kvcompile.passes.plan_formats import EXACT_FORMATS

_NAME = r"[a-z]*\d+(?:_e\dm\d)?|auto"
_K_AND_V = re.compile(rf"k(?P<k>{_NAME})-?v(?P<v>{_NAME})")
_COMMA_OUTSIDE_LISTS = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True)
class FormatRequest:
    """One format of the cache.

    Attributes:
        label: What the user wrote.
        options: Options of the backend; valid ones.
    """

    label: str
    options: Mapping[str, Any]

    def formats(self, dtype: torch.dtype) -> frozenset[str]:
        """Return the formats of K and V that layers of a model may have, as `int8/int4`."""
        pairs = parse_options(self.options).dtypes().pairs()
        return frozenset("/".join(_stored_as(name, dtype) for name in pair) for pair in pairs)

    def shrinks(self, dtype: torch.dtype) -> bool:
        """Whether some K or V is asked to take fewer bits than the model's dtype."""
        names = (name for pair in self.formats(dtype) for name in pair.split("/"))
        return any(_bits(name) < 8 * dtype.itemsize for name in names)


def parse_formats(lists: Sequence[str], common: Mapping[str, Any]) -> list[FormatRequest]:
    """Return the formats asked for.

    A list is separated by commas. One format is a name of `kv_cache_dtype` (`int4`), or names for
    K and V (`kint8-vint4`, in short `k8v4`), and may be followed by a colon and further options of
    the backend (`int4:residual_length=32,num_sink_tokens=0`).

    Args:
        lists: What the user wrote.
        common: Options that every format gets.

    Raises:
        OptionError: Some are malformed or refused; the message has a line for each of them.
    """
    requests: dict[str, FormatRequest] = {}
    refusals: list[str] = []
    for token in (token for text in lists for token in _split(text)):
        try:
            request = _parse(token, common)
        except OptionError as error:
            refusals.append(f"format {token!r}: {error}")
            continue
        if token in requests:
            refusals.append(f"format {token!r} is given twice")
        requests[token] = request
    if not requests and not refusals:
        refusals.append("no format is given, such as 'int8'")
    if refusals:
        raise OptionError("\n".join(refusals))
    return list(requests.values())


def _split(text: str) -> list[str]:
    """Split a list of formats; a piece such as `key=value` belongs to the format before it."""
    tokens: list[str] = []
    for piece in _COMMA_OUTSIDE_LISTS.split(text):
        is_option = ":" not in piece.partition("=")[0] and "=" in piece
        if is_option and tokens:
            tokens[-1] += f",{piece.strip()}"
        elif piece.strip():
            tokens.append(piece.strip())
    return tokens


def _parse(token: str, common: Mapping[str, Any]) -> FormatRequest:
    name, _, rest = token.partition(":")
    if "=" in name:
        fixed = ":".join(name.split(",", 1)) if "," in name else f"auto:{name}"
        raise OptionError(f"options stand behind a format and a colon: did you mean {fixed!r}?")
    options = dict(common)
    halves = _K_AND_V.fullmatch(name)
    if halves:
        options["k_cache_dtype"] = _spelled_out(halves["k"])
        options["v_cache_dtype"] = _spelled_out(halves["v"])
    else:
        options["kv_cache_dtype"] = name
    given = set(options) - set(common)
    for pair in _COMMA_OUTSIDE_LISTS.split(rest) if rest else ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"{pair!r} is no option: write 'name=value'")
        if key in given:
            raise OptionError(f"option {key!r} is given twice")
        given.add(key)
        options[key] = _value(value)
    parse_options(options)
    return FormatRequest(token, options)


def _spelled_out(name: str) -> str:
    return f"int{name}" if name.isdigit() else name


def _value(text: str) -> Any:
    """Return the value that a text stands for: a list, a number, a truth value, or itself."""
    if text.startswith("[") and text.endswith("]"):
        return [_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _stored_as(name: str, dtype: torch.dtype) -> str:
    return EXACT_FORMATS.get(dtype, str(dtype)) if name == "auto" else name


def _bits(name: str) -> int:
    """Return the bits of one number in a format; they are the first number in its name."""
    digits = re.search(r"\d+", name)
    assert digits is not None
    return int(digits.group())
