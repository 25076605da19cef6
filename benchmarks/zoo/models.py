"""The classes that are asked for, and how one of them is built and given a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.zoo.configurations import tiny_config
from benchmarks.zoo.exceptions import PREPARE, PROMPTS

PROMPT_TOKENS = 20
NEW_TOKENS = 12

_MAPPINGS = {
    "decoder": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
}


@dataclass(frozen=True)
class Entry:
    """One class of transformers.

    Attributes:
        name: Name of the class.
        model_type: Name of its configuration in transformers' tables.
        family: `decoder`, `encoder-decoder` or `multimodal`.
    """

    name: str
    model_type: str
    family: str


def entries() -> list[Entry]:
    """Return all classes, each once, under the first table that has it."""
    found: dict[str, Entry] = {}
    for family, mapping in _MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in names if isinstance(names, tuple) else (names,):
                found.setdefault(name, Entry(name, model_type, family))
    return list(found.values())


def build(entry: Entry) -> PreTrainedModel:
    """Return a tiny model of a class, with random weights, in evaluation mode."""
    model_class = getattr(transformers, entry.name)
    config_class: Any = CONFIG_MAPPING[entry.model_type]
    own = model_class.config_class
    if isinstance(own, type) and not issubclass(config_class, own):
        config_class = own
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(tiny_config(config_class, entry.name))
    model.eval()
    PREPARE.get(entry.name, lambda _: None)(model)
    return model


def prompt(entry: Entry, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what `generate` is given: token ids [1, T], and what else the class needs."""
    if entry.name in PROMPTS:
        return PROMPTS[entry.name](model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 100, (1, PROMPT_TOKENS), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
