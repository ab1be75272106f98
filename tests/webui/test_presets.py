"""Which sampling parameters are sent."""

from __future__ import annotations

from service.protocol import Params
from webui import presets


def test_only_what_differs_or_is_named_by_a_preset_is_sent() -> None:
    shown = {name: getattr(Params(), name) for name in presets.OFFERED}
    assert presets.changed("default", shown) == {}
    assert presets.changed("default", {**shown, "top_k": 40.0}) == {"top_k": 40}
    assert presets.changed("balanced", {**shown, **presets.shown_values("balanced")}) == presets.PRESETS["balanced"]
