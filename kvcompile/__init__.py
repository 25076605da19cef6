"""A compiler for the KV cache: `torch.compile(model, backend="kvcompile")`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcompile.adoption import adopt as adopt
    from kvcompile.backend import compile as compile
    from kvcompile.codegen.errors import KvcompileError as KvcompileError
    from kvcompile.explanation import Explanation as Explanation
    from kvcompile.explanation import explain as explain
    from kvcompile.options import CacheOptions as CacheOptions
    from kvcompile.options import OptionError as OptionError
    from kvcompile.passes.ir.remarks import notices as notices
    from kvcompile.runtime.cache_files import load_cache as load_cache
    from kvcompile.runtime.cache_files import save_cache as save_cache
    from kvcompile.runtime.errors import CacheBudgetError as CacheBudgetError
    from kvcompile.runtime.report import memory_report as memory_report

__version__ = "0.1.0"

_PUBLIC = {
    "CacheBudgetError": "kvcompile.runtime.errors",
    "CacheOptions": "kvcompile.options",
    "Explanation": "kvcompile.explanation",
    "KvcompileError": "kvcompile.codegen.errors",
    "OptionError": "kvcompile.options",
    "adopt": "kvcompile.adoption",
    "compile": "kvcompile.backend",
    "explain": "kvcompile.explanation",
    "load_cache": "kvcompile.runtime.cache_files",
    "memory_report": "kvcompile.runtime.report",
    "notices": "kvcompile.passes.ir.remarks",
    "save_cache": "kvcompile.runtime.cache_files",
}

__all__ = [
    "CacheBudgetError",
    "CacheOptions",
    "Explanation",
    "KvcompileError",
    "OptionError",
    "adopt",
    "compile",
    "explain",
    "load_cache",
    "memory_report",
    "notices",
    "save_cache",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvcompile' has no attribute {name!r}")
    found = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
