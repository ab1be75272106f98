"""The real daemon as a process, with the toy model in place of a real one: it starts in half a second.

`python -m tests.faults.toy_process FLAGS`: the daemon's own flags. The variable TOY has a JSON object:
`decode_s`, `end_one_in`, `num_slots`; `fault`: what the engine thread raises at the 20th decode; `num_files`: the
limit of open files.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from service import daemon
from service.engine.base import OutOfMemory
from service.engine.thread import Loaded
from service.settings import Settings
from tests.harness import load_toy
from tests.toy import Call, ToyCost, ToyRunner

FAULTS: dict[str, Exception] = {
    "bug": RuntimeError("injected"), "memory": MemoryError("injected"), "OOM": OutOfMemory("injected"),
    "CUDA": RuntimeError("CUDA error: an illegal memory access was encountered"),
}  # fmt: skip


def main() -> None:
    options: dict[str, Any] = json.loads(os.environ.get("TOY", "{}"))
    if num_files := options.get("num_files"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    num_decodes = 0

    def strike(call: Call, slot: int) -> Exception | None:
        nonlocal num_decodes
        num_decodes += call == "decode"
        return FAULTS[options["fault"]] if "fault" in options and num_decodes == 20 else None

    def load(settings: Settings, progress: Callable[[float], None]) -> Loaded:
        cost = ToyCost(options.get("decode_s", 0.005), 0.0, 0.005, 0.0)
        runner = ToyRunner(
            options.get("num_slots", 3), end_one_in=options.get("end_one_in", 0), cost=cost, spend=time.sleep,
            fault=strike,
        )  # fmt: skip
        return load_toy(runner)

    daemon.load = load
    daemon.main(sys.argv[1:])


if __name__ == "__main__":
    main()
