"""Names and source lines of the user's model, read off a node's metadata."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = f"{os.sep}torch{os.sep}"


def where(node: fx.Node) -> str:
    """Return the innermost source line outside torch that made this node, as `file.py:12`."""
    trace = node.meta.get("stack_trace") or ""
    frames = [f for f in _FRAME.findall(trace) if _TORCH not in f[0]]
    if not frames:
        return ""
    path, line = frames[-1]
    return f"{Path(path).name}:{line}"


def module_path(node: fx.Node) -> str:
    """Return the path of the module that ran this node (`model.layers.3.self_attn`), or ""."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    raw = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\[[^\]]*\](\[\d+\])?\.?", "", raw)
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    return path.strip(".")
