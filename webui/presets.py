"""Sampling presets, and which parameters a user has changed.

Pure. The page shows `Params`' values, but the model's family has defaults of its own, so what nobody changed is not
sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from service.protocol import Params

MODEL_DEFAULT = "default"
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        MODEL_DEFAULT: {},
        "precise": {"temperature": 0.2, "top_p": 0.7},
        "balanced": {"temperature": 0.8, "top_p": 0.8},
        "creative": {"temperature": 1.2, "top_p": 0.95},
    }
)
# The parameters that the page offers, in its order.
OFFERED = ("temperature", "top_p", "top_k", "max_new_tokens", "repetition_penalty")


def shown_values(preset: str) -> dict[str, Any]:
    """What the sliders show after a preset was chosen: temperature and top_p."""
    defaults = Params()
    chosen = PRESETS.get(preset, {})
    return {name: chosen.get(name, getattr(defaults, name)) for name in ("temperature", "top_p")}


def changed(preset: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters to send: those that a preset names, and those that differ from what the page began with."""
    defaults = Params()
    named = PRESETS.get(preset, {})
    sent = {}
    for name, value in values.items():
        default = getattr(defaults, name)
        if value is None:
            continue
        if isinstance(default, int):
            value = int(value)
        if name in named or value != default:
            sent[name] = value
    return sent
