"""Where the compiled `step.c` and `prefill.c` are: built at the install, for each instruction set. Imports no torch."""

from __future__ import annotations

from pathlib import Path

_ADVICE = "install a C compiler (gcc 11 or newer), then `pip install -e .` again: "
_NOTHING = "without it decoding takes twice as long"
_NOT_THE_BEST = "without AMX prompts take two to three times as long"
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"}
_NEEDS = {  # the best first
    "amx": {*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c"},
}


def find_libraries(proc: Path = Path("/proc")) -> dict[str, Path]:
    """What was built and runs on this processor, by instruction set, the best first. `proc` is where /proc is."""
    built = {name: sorted(Path(__file__).parent.glob(f"_step_{name}.*so")) for name in find_runnable(proc)}
    return {name: paths[0] for name, paths in built.items() if paths}


def read_flags(proc: Path = Path("/proc")) -> set[str]:
    """What the processor can do, in the kernel's words; empty where it does not say."""
    try:
        lines = (proc / "cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def find_runnable(proc: Path = Path("/proc")) -> list[str]:
    """The instruction sets that this processor could run, the best first."""
    flags = read_flags(proc)
    return [name for name, needed in _NEEDS.items() if needed <= flags]


def find_lack(proc: Path = Path("/proc")) -> tuple[str, str] | None:
    """What this processor could run and was not built, and what to do; None when all is well, or nothing runs here."""
    runnable, built = find_runnable(proc), list(find_libraries(proc))
    if runnable[:1] == built[:1]:
        return None
    if not built:
        return "the compiled step is not there", _ADVICE + _NOTHING
    return f"the compiled step is there for {built[0]} only, and not for {runnable[0]}", _ADVICE + _NOT_THE_BEST
