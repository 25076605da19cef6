"""`kvcompile.adopt`: K and V that a module keeps in buffers of its own move into pages."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from kvcompile.codegen.errors import KvcompileError
from kvcompile.passes.plan_formats import EXACT_FORMATS
from kvcompile.runtime.adopted import adopted
from kvcompile.runtime.handle import KVTensor


class AdoptionError(KvcompileError):
    """A buffer cannot be adopted; the module is left as it was."""


@dataclass(frozen=True)
class _Buffer:
    """A tensor that a module holds, and where."""

    name: str
    owner: MutableMapping[str, Any]
    key: str
    tensor: torch.Tensor


def adopt(model: object, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Let the K and V that a module or a cache keeps in dense buffers move into pages.

    The buffers are replaced by handles at once, and their contents by pages in the first step of
    a graph that this backend compiles and that writes tokens into them; the dense memory is then
    released. What no such graph writes to goes on as the dense tensor it was.

    Args:
        model: A module, or what `torch.compile` has made of it; call its `.to(...)` before. Or a
            cache whose layers hold their tensors already, such as a `StaticCache` of transformers
            after `early_initialization`.
        names: Names of buffers as `named_buffers` gives them, or patterns like `*.k_cache`. By
            default every floating-point buffer, or tensor kept as a plain attribute, of four
            dimensions that has its memory for itself.

    Returns:
        The names of the adopted buffers, those that were adopted before among them.

    Raises:
        AdoptionError: A name fits no buffer, a named buffer cannot be adopted, or there is none.
    """
    module = model._orig_mod if isinstance(model, OptimizedModule) else model
    found = list(_buffers(module))
    if names is None:
        chosen = [buffer for buffer in found if _refusal(buffer.tensor) is None]
        if not chosen:
            why = "; ".join(f"{b.name} {_refusal(b.tensor)}" for b in found) or "it has no buffers"
            raise AdoptionError(f"{type(module).__name__} has nothing to adopt: {why}")
    else:
        chosen = _named(found, names, type(module).__name__)
    handles: dict[int, KVTensor] = {}  # a tensor that two modules share stays shared
    for buffer in chosen:
        if id(buffer.tensor) not in handles:
            handles[id(buffer.tensor)] = _handle(buffer.tensor)
    for buffer in chosen:
        buffer.owner[buffer.key] = handles[id(buffer.tensor)]
    return tuple(buffer.name for buffer in chosen)


def _handle(tensor: torch.Tensor) -> KVTensor:
    if isinstance(tensor, KVTensor):
        return tensor
    with torch.inference_mode(mode=False):
        # An inference tensor has no version counter, which is how writes are noticed.
        return adopted(tensor.clone() if tensor.is_inference() else tensor)


def _buffers(model: object) -> Iterator[_Buffer]:
    """Yield registered buffers and tensors that are plain attributes, with their names."""
    for path, owner in _owners(model):
        for key, tensor in owner.items():
            if isinstance(tensor, torch.Tensor):
                yield _Buffer(f"{path}.{key}" if path else key, owner, key, tensor)


def _owners(model: object) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """Yield what holds tensors, with a path to it: the parts of a module, the layers of a cache."""
    if isinstance(model, nn.Module):
        for path, part in model.named_modules():
            yield path, part._buffers
            yield path, vars(part)
        return
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list):
        raise AdoptionError(
            f"a {type(model).__name__} was to be adopted; give a module, or a cache with layers"
        )
    for number, layer in enumerate(layers):
        yield f"layers.{number}", vars(layer)


def _refusal(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be adopted, to be read behind its name, or None."""
    if isinstance(tensor, KVTensor):
        return None
    if tensor.dim() != 4:
        return f"has {tensor.dim()} dimensions, not 4"
    if tensor.dtype not in EXACT_FORMATS:
        return f"is {tensor.dtype}, which no page holds exactly"
    if tensor.requires_grad:
        return "requires grad"
    if tensor.device.type == "meta":
        return "has no memory yet (device meta)"
    if tensor._is_view() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return "is a view of other memory, which would not be released"
    return None


def _named(found: Sequence[_Buffer], names: Sequence[str], model: str) -> list[_Buffer]:
    """Return the buffers that names or patterns mean.

    Raises:
        AdoptionError: A pattern fits none, or one of those that it fits cannot be adopted.
    """
    if isinstance(names, str):
        names = [names]
    for pattern in names:
        if not any(fnmatchcase(buffer.name, pattern) for buffer in found):
            known = ", ".join(buffer.name for buffer in found) or "none"
            raise AdoptionError(f"{pattern!r} names no buffer of {model}; it has: {known}")
    chosen = [b for b in found if any(fnmatchcase(b.name, pattern) for pattern in names)]
    for buffer in chosen:
        if (why := _refusal(buffer.tensor)) is not None:
            raise AdoptionError(f"the buffer {buffer.name} {why}; name K and V buffers only")
    return chosen
