"""Build of vllm-ktx: where the four top folders land in the package, and how the native CPU kernels are compiled.

Owns the package mapping and the compiler flags; everything declarative stands in pyproject.toml. The native library
is plain C++ behind a C ABI (ctypes loads it), so the build needs neither torch nor Python's headers. It is optional:
without a working compiler the install succeeds, says so, and KTX runs its torch path.
"""

import os
import platform
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

FOLDERS = {
    "vllm_ktx": "vllm_ktx",
    "vllm_ktx.attention_backends": "attention_backends",
    "vllm_ktx.kv_quant": "kv_quant",
    "vllm_ktx.offload": "offload",
}
CSRC = Path("attention_backends/cpu/csrc")

# -ffast-math stays out: it would let the compiler assume away the NaN and infinity inputs whose result is defined.
COMMON_FLAGS = [
    *("-O3", "-g0", "-std=c++17", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12 warns of its own intrinsics
]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16"),
        *("-mavx2", "-mfma", "-mf16c"),
    ],
}


def isa_of(source: str) -> str | None:
    """The instruction set that a source file is written for (`decode_avx2.cpp` -> `avx2`), None for portable code."""
    suffix = Path(source).stem.rsplit("_", 1)[-1]
    return suffix if suffix in ISA_FLAGS else None


class BuildNative(build_ext):
    """build_ext that gives each source the flags of its ISA, leaves out what the compiler can't do, and uses all cores.

    `KTX_HAVE_AVX2` and `KTX_HAVE_AVX512` are defined as 1 or 0 for every source, so the dispatcher refers only to
    variants that were compiled.
    """

    def build_extension(self, ext: Extension) -> None:
        available = {isa for isa in ISA_FLAGS if self._compiler_can(isa)}
        ext.sources = [source for source in ext.sources if isa_of(source) in available | {None}]
        ext.define_macros += [(f"KTX_HAVE_{isa.upper()}", str(int(isa in available))) for isa in ISA_FLAGS]

        compile_sources = self.compiler.compile

        def compile_with_isa_flags(sources, extra_postargs=None, **kwargs):
            def compile_one(source):
                flags = ISA_FLAGS.get(isa_of(source), [])
                return compile_sources([source], extra_postargs=[*(extra_postargs or []), *flags], **kwargs)

            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                return [name for names in pool.map(compile_one, sources) for name in names]

        self.compiler.compile = compile_with_isa_flags
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_sources

    def _compiler_can(self, isa: str) -> bool:
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return False
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.cpp")
            probe.write_text("#include <immintrin.h>\nint main() { return 0; }\n")
            # The compiler that setuptools itself will run for C++: compiler_cxx where it exists, else compiler_so.
            driver = getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so
            command = [driver[0], *ISA_FLAGS[isa], "-std=c++17", "-c", str(probe), "-o", str(probe.with_suffix(".o"))]
            try:
                return subprocess.run(command, capture_output=True, check=False).returncode == 0
            except OSError:
                return False


def all_packages() -> list[str]:
    """Every package under the four folders, by the name it is imported under."""
    names = []
    for package, folder in FOLDERS.items():
        names += [package, *(f"{package}.{sub}" for sub in find_packages(folder))]
    return names


def native_extension() -> list[Extension]:
    """The kernels' shared library, or nothing where the sources are absent."""
    sources = sorted(str(path) for path in CSRC.glob("*.cpp"))
    if not sources:
        return []
    return [
        Extension(
            "vllm_ktx.attention_backends.cpu._native",
            sources=sources,
            depends=sorted(str(path) for path in CSRC.glob("*.h*")),
            extra_compile_args=COMMON_FLAGS,
            # Compiled with -fopenmp but not linked with it: two OpenMP runtimes in one process would start two thread
            # pools. The loader brings torch's libgomp into the global namespace first, and the symbols resolve there.
            extra_link_args=[],
            language="c++",
            optional=True,
        )
    ]


setup(
    packages=all_packages(),
    package_dir=FOLDERS,
    package_data={"vllm_ktx": ["py.typed"]},
    ext_modules=native_extension(),
    cmdclass={"build_ext": BuildNative},
)
