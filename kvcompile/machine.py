"""What a figure must be read with: processor, threads, versions."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import kvcompile


def machine() -> dict[str, str]:
    """Return the processor's name, the number of threads, and versions."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kvcompile": kvcompile.__version__,
    }
