"""A tiny configuration for any model class of transformers: one rule, and exceptions.

The rule sets every size that a configuration has to a small number, in its parts too, and gives a
model that mixes kinds of layers at least one of each. What remains is in `exceptions.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from transformers import PreTrainedConfig

from benchmarks.zoo.exceptions import EXCEPTIONS, WITHOUT_DEFAULT
from benchmarks.zoo.sizes import HEAD_DIM, SIZES


class NoConfigurationError(Exception):
    """A class whose configuration cannot be made small by the rule."""


def tiny_config(config_class: type[PreTrainedConfig], model: str = "") -> PreTrainedConfig:
    """Return a small configuration.

    Args:
        config_class: Class of the configuration.
        model: Name of the model class, whose exceptions go before those of the configuration.
    """
    exceptions = EXCEPTIONS.get(config_class.__name__, {}) | EXCEPTIONS.get(model, {})
    default = _default(config_class)
    given: dict[str, Any] = {}
    for name in _fields(config_class):
        if name in exceptions:
            continue
        value = vars(default).get(name)
        if isinstance(value, PreTrainedConfig):
            given[name] = tiny_config(type(value))
        elif name in SIZES:
            given[name] = SIZES[name]
    if "kv_lora_rank" in given:  # latents have no KV heads of their own
        given["num_key_value_heads"] = SIZES["num_attention_heads"]
    given |= _angles(default)
    kinds = _kinds(default)
    if kinds and "layer_types" not in exceptions and "layer_types" in _fields(config_class):
        layers = max(SIZES["num_hidden_layers"], len(kinds))
        layers = exceptions.get("num_hidden_layers", layers)
        given |= {
            "num_hidden_layers": layers,
            "layer_types": [kinds[i % len(kinds)] for i in range(layers)],
        }
    given |= {n: v for n, v in exceptions.items() if "." not in n}
    return config_class(**given)


def _default(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return the configuration that a class has without arguments."""
    return config_class(**WITHOUT_DEFAULT.get(config_class.__name__, {}))


def _fields(config_class: type[PreTrainedConfig]) -> list[str]:
    """Return the names that a configuration's constructor takes."""
    if dataclasses.is_dataclass(config_class):
        return [f.name for f in dataclasses.fields(config_class) if f.init]
    return list(inspect.signature(config_class.__init__).parameters)[1:]


def _angles(config: PreTrainedConfig) -> dict[str, Any]:
    """Return rotary parameters whose sections for time, height and width fit a small head."""
    found = getattr(config, "rope_parameters", None) or {}
    known = getattr(config, "ignore_keys_at_rope_validation", None) or ()
    if "mrope_section" not in (*found, *known) or any(isinstance(v, dict) for v in found.values()):
        return {}
    pairs = int(HEAD_DIM * found.get("partial_rotary_factor", 1.0)) // 2
    found = {"rope_type": "default", "rope_theta": 10000.0} | found
    sections = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
    return {"rope_parameters": found | {"mrope_section": sections}}


def _kinds(config: PreTrainedConfig) -> list[str]:
    """Return the kinds of layers of a configuration, each once."""
    return list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
