"""Builds the compiled step: plain C, one shared library, one object an instruction set and dtype.

Without a C compiler, or on another processor than x86-64, the package installs without it and computes with torch.
"""

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("src/kvouch/kernels")
FLAGS = "-std=c11 -O3 -fPIC -Wall -Wextra -fno-fast-math -ffp-contract=off -fno-math-errno -fno-trapping-math".split()
AVX2 = "-mavx2 -mfma -mf16c".split()
AVX512 = [*AVX2, *"-mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512".split()]
SANITIZE = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all".split()  # for `make sanitize`
EXTRA = SANITIZE if os.environ.get("KVOUCH_SANITIZE") else []
VARIANTS = {  # variant: its flags, and the dtypes that it has a step for
    "avx2": (AVX2, ("f32", "bf16", "f16")),
    "avx512": (AVX512, ("f32", "bf16", "f16")),
    "avx512_bf16": ([*AVX512, "-mavx512bf16", "-DDOT_PAIRS_HERE"], ("bf16",)),
}


class BuildKernels(build_ext):
    """Compiles forward.c once for each variant and dtype, and links all of it."""

    def build_extension(self, ext: Extension) -> None:
        sources = hashlib.sha256(b"".join(path.read_bytes() for path in sources_of_kernels())).hexdigest()
        command = list(self.compiler.compiler_so)
        version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout.decode()
        build = hashlib.sha256(repr((sources, version, command, FLAGS, EXTRA, VARIANTS)).encode()).hexdigest()
        digests = [f'-DKV_SOURCES="{sources}"', f'-DKV_BUILD="{build}"']
        objects = self._compile(["library.c", "team.c"], digests, "common")
        for variant, (flags, dtypes) in VARIANTS.items():
            for dtype in dtypes:
                defined = [f"-DVARIANT={variant}", f"-DDTYPE={dtype}", f"-DDTYPE_IS_{dtype}"]
                objects += self._compile(["forward.c"], [*flags, *defined], f"{variant}_{dtype}")
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, target, libraries=["pthread"], extra_postargs=EXTRA)

    def get_ext_filename(self, fullname: str) -> str:
        """A plain library, loaded by name: no module of this or that Python."""
        return os.path.join(*fullname.split(".")) + ".so"

    def _compile(self, names: list[str], flags: list[str], folder: str) -> Any:
        return self.compiler.compile(
            [str(KERNELS / name) for name in names],
            output_dir=os.path.join(self.build_temp, folder),
            extra_preargs=[*FLAGS, *flags, *EXTRA],
            depends=[str(path) for path in sources_of_kernels()],
        )


def sources_of_kernels() -> list[Path]:
    return sorted([*KERNELS.glob("*.c"), *KERNELS.glob("*.h")])


def extensions() -> list[Extension]:
    if platform.machine().lower() not in ("x86_64", "amd64") or os.name != "posix":
        return []
    sources = [str(path) for path in KERNELS.glob("*.c")]
    headers = [str(path) for path in KERNELS.glob("*.h")]
    return [Extension("kvouch.kernels.step", sources, depends=headers, optional=True)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
