"""The one compiled part: `step.c` and `prefill.c` in `service/models/`, once per instruction set. All else: setup.cfg.

It is plain C, called through ctypes: no header of Python or torch is needed, only a C compiler. Without one the install
goes on, and decoding takes torch's kernels instead, about half as fast.
"""

from __future__ import annotations

import platform

from setuptools import Extension, setup

_FLAGS = [
    "-std=gnu11", "-O3", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi",
    # Sums may be reordered, so that loops become vectors. NaN and infinity keep their meaning.
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
]  # fmt: skip
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c",
           "-mprefer-vector-width=512"]  # fmt: skip
_INSTRUCTION_SETS = {
    "avx2": (["step.c"], ["-mavx2", "-mfma", "-mf16c"]),
    "avx512": (["step.c"], _AVX512),
    "amx": (["step.c", "prefill.c"], [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]),
}
_FOLDER = "service/models/"
_CAN_BUILD = platform.system() == "Linux" and platform.machine() == "x86_64"

setup(
    ext_modules=[
        # Not linked with -fopenmp: torch's own libgomp is to be used, see step.c.
        Extension(f"service.models._step_{name}", [_FOLDER + source for source in sources],
                  depends=[_FOLDER + "step.h", _FOLDER + "lanes.h"], extra_compile_args=[*_FLAGS, *flags],
                  optional=True)
        for name, (sources, flags) in _INSTRUCTION_SETS.items() if _CAN_BUILD
    ]
)  # fmt: skip
