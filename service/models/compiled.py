"""Where the compiled `step.c` is: built at the install, once for each instruction set. Imports no torch."""

from __future__ import annotations

from pathlib import Path

ADVICE = "install a C compiler (gcc), then `pip install -e .` again: without it decoding takes twice as long"
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"}
_NEEDS = {  # the best first
    "amx": {*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c"},
}


def find_libraries(proc: Path = Path("/proc")) -> dict[str, Path]:
    """What was built and runs on this processor, by instruction set, the best first. `proc` is where /proc is."""
    flags = read_flags(proc)
    built = {name: sorted(Path(__file__).parent.glob(f"_step_{name}.*so")) for name in _NEEDS}
    return {name: built[name][0] for name, needed in _NEEDS.items() if built[name] and needed <= flags}


def read_flags(proc: Path = Path("/proc")) -> set[str]:
    """What the processor can do, in the kernel's words; empty where it does not say."""
    try:
        lines = (proc / "cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def can_run(proc: Path = Path("/proc")) -> bool:
    """Whether this processor could run one of them."""
    return any(needed <= read_flags(proc) for needed in _NEEDS.values())
