"""Builds the compiled parts with ninja; the metadata are in pyproject.toml.

    kfconvert/_ops_cpu.so    CPU kernels, LibTorch stable ABI: one file for every Python and torch >= 2.11
    kfconvert/_ops_cuda.so   CUDA kernels, the same; built where nvcc and a CUDA build of torch are found
    kfconvert/_C.*.so        build facts, and the checks of every call (pybind11)

Environment: CXX, CUDA_HOME, KFCONVERT_CUDA_ARCHS (such as "8.0 9.0"; by default those of the GPUs that are there),
KFCONVERT_NO_CUDA=1, KFCONVERT_TUNE=1 (for
scripts/tune_kernels.py), MAX_JOBS (default 2). Where a tool is missing altogether the package is installed
without the part, and one line says so; a compiler that is there and reports an error fails the build.
"""

import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
SOURCES = ROOT / "kfconvert" / "csrc"
TORCH_TARGET = "2.11"
TARGET_VERSION = "0x020b000000000000"  # the same as TORCH_TARGET, in the form the headers want

# Kernels are compiled for each of these and chosen when the library loads (csrc/cpu/dispatch.cpp).
CPU_CAPABILITIES = {
    "generic": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mfma",
        "-mf16c",
        "-mprefer-vector-width=512",
    ],
}
KERNEL_FLAGS = [
    "-O3",
    "-fopenmp-simd",
    "-fno-exceptions",
    "-fno-math-errno",
    "-fno-trapping-math",
    # GCC's own AVX-512 headers trip this warning.
    "-Wno-maybe-uninitialized",
]
COMMON_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]


def package_dir(name: str) -> Path | None:
    """Where an installed package lies, without importing it (importing torch takes seconds)."""
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def find_compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def find_ninja() -> str | None:
    if (package := package_dir("ninja")) is None:  # it writes the file, too
        return None
    script = Path(sysconfig.get_path("scripts")) / "ninja"
    for candidate in (script, package / "data" / "bin" / "ninja"):
        if candidate.exists():
            return str(candidate)
    return shutil.which("ninja")


def find_nvcc() -> str | None:
    if os.environ.get("KFCONVERT_NO_CUDA") == "1":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = ([str(Path(home) / "bin" / "nvcc")] if home else []) + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    nvcc = next((path for name in candidates if (path := shutil.which(name))), None)
    if nvcc and not cuda_archs():
        print('kfconvert: no GPU here, so no CUDA kernels; KFCONVERT_CUDA_ARCHS="8.0 9.0" builds them', flush=True)
        return None
    return nvcc


def warn(text: str) -> None:
    print(f"kfconvert: WARNING: {text}", file=sys.stderr, flush=True)


def cuda_archs() -> list[str]:
    """Those to build for, without a dot: what the environment says, else the GPUs that are there."""
    named = os.environ.get("KFCONVERT_CUDA_ARCHS")
    if named is None:
        return gpus()
    archs = [part.replace(".", "") for part in re.split(r"[;,\s]+", named) if part]
    if not archs or not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
        raise SystemExit('kfconvert: KFCONVERT_CUDA_ARCHS must be like "8.0 9.0"')
    return archs


@functools.cache
def gpus() -> list[str]:
    """The compute capabilities of this machine's GPUs, the smallest first; those below 8.0 are not served."""
    try:
        text = run_text(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    except (OSError, subprocess.CalledProcessError):
        return []
    found = {int(line.replace(".", "")) for line in text.split() if re.fullmatch(r"\d+\.\d", line)}
    return [str(capability) for capability in sorted(found) if capability >= 80]


def wheel_cuda_dirs() -> tuple[list[str], list[str]]:
    """Include and library folders of the CUDA packages that a torch wheel depends on."""
    nvidia = package_dir("nvidia")
    parts = sorted(nvidia.glob("*")) if nvidia else []
    return (
        [str(p / "include") for p in parts if (p / "include" / "cuda_runtime.h").exists()],
        [str(p / "lib") for p in parts if (p / "lib" / "libcudart_static.a").exists()],
    )


def cuda_toolkit_flags(nvcc: str) -> tuple[list[str], list[str]]:
    """(compile, link) flags that complete a toolkit that lacks headers; empty for a complete one."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cu"
        probe.write_text("#include <cuda_runtime.h>\n#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n")
        includes, libraries = wheel_cuda_dirs()
        wheel = ([f"-I{path}" for path in includes], [f"-L{path}" for path in libraries])
        for compile_flags, link_flags in (([], []), wheel):
            command = [nvcc, "-E", *compile_flags, str(probe), "-o", os.devnull]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode == 0:
                return compile_flags, link_flags
    raise SystemExit(
        f"kfconvert: {nvcc} cannot compile (set KFCONVERT_NO_CUDA=1 to build without CUDA):\n{result.stderr}"
    )


def add_build(ninja, out: Path, rule: str, inputs: list[Path], flags: list[str]) -> Path:
    """Rules are one a tool; what differs by file is in the variable `flags`. Returns ``out``."""
    ninja.build(str(out), rule, [str(path) for path in inputs], variables={"flags": shell(flags)})
    return out


def shell(flags: list[str]) -> str:
    return " ".join("'" + flag.replace("$", "$$") + "'" if re.search(r"[\s;()\"\\]", flag) else flag for flag in flags)


class Plan:
    """What can be built here, and how. ``write`` lays it out for ninja."""

    def __init__(self):
        self.cxx, self.ninja, self.torch = find_compiler(), find_ninja(), package_dir("torch")
        missing = [
            name
            for name, found in (("a C++ compiler", self.cxx), ("ninja", self.ninja), ("torch", self.torch))
            if not found
        ]
        self.possible = not missing
        if missing:
            warn(f"{' and '.join(missing)} not found at build time: installing without compiled kernels, on plain ATen")

    def write(self, folder: Path) -> dict[str, Path]:
        """Writes ``folder``/build.ninja; returns {name in the package: where ninja leaves it}."""
        from ninja.ninja_syntax import Writer  # where it is missing, nothing is built

        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "build.ninja").open("w") as file:
            output: Any = file  # Writer writes to it, but is annotated to take a string
            return self._write(Writer(output), folder)

    def _write(self, ninja, folder: Path) -> dict[str, Path]:
        ninja.variable("ninja_required_version", "1.5")
        ninja.rule("cxx", f"{self.cxx} -MMD -MF $out.d $flags -c $in -o $out", depfile="$out.d", deps="gcc")
        ninja.rule("link", f"{self.cxx} -shared $in $flags -o $out")
        outputs = {"_ops_cpu.so": self.cpu_library(ninja, folder)}
        nvcc = find_nvcc()
        if nvcc and not (self.torch / "lib" / "libtorch_cuda.so").exists():
            warn("nvcc is there, but the installed torch has no CUDA: the CUDA kernels are left out")
            nvcc = None
        if nvcc:
            outputs["_ops_cuda.so"] = self.cuda_library(ninja, folder, nvcc)
        if package_dir("pybind11") is not None:
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            outputs[f"_C{suffix}"] = self.facts_module(ninja, folder, nvcc, folder / f"_C{suffix}")
        else:
            warn("no pybind11 at build time: kfconvert._C is left out, calls of converted models are checked in Python")
        return outputs

    def torch_flags(self) -> list[str]:
        return [f"-DTORCH_TARGET_VERSION={TARGET_VERSION}", "-isystem", str(self.torch / "include")]

    def torch_libraries(self, *names: str) -> list[str]:
        return [f"-L{self.torch / 'lib'}", *(f"-l{name}" for name in names)]

    def cpu_library(self, ninja, folder: Path) -> Path:
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        objects = []
        for capability, flags in CPU_CAPABILITIES.items():
            if capability != "generic" and not x86:
                continue
            for source in sorted((SOURCES / "cpu").glob("*_kernel.cpp")):
                out = folder / f"{source.stem}_{capability}.o"
                define = [f"-DKFC_CAPABILITY={capability}"]
                objects.append(add_build(ninja, out, "cxx", [source], COMMON_FLAGS + KERNEL_FLAGS + flags + define))
        host = COMMON_FLAGS + ["-O2", *self.torch_flags()] + (["-DKFC_X86"] if x86 else [])
        for name in ("dispatch", "operators"):
            objects.append(add_build(ninja, folder / f"cpu_{name}.o", "cxx", [SOURCES / "cpu" / f"{name}.cpp"], host))
        return add_build(ninja, folder / "_ops_cpu.so", "link", objects, self.torch_libraries("torch_cpu", "torch"))

    def cuda_library(self, ninja, folder: Path, nvcc: str) -> Path:
        compile_flags, link_flags = cuda_toolkit_flags(nvcc)
        archs = cuda_archs()
        gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        gencode.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        ninja.rule("nvcc", f"{nvcc} -MMD -MF $out.d $flags -c $in -o $out", depfile="$out.d", deps="gcc")
        # The runtime is linked statically and its symbols stay inside: whichever libcudart torch brings is
        # not ours. A kernel that is listed and has no launcher fails here, not where the library is loaded.
        linker = "-Xlinker --exclude-libs=ALL -Xlinker -z,defs"
        ninja.rule("nvlink", f"{nvcc} -shared -cudart static {linker} $in $flags -o $out")
        flags = [
            *(["-DKFC_TUNE"] if os.environ.get("KFCONVERT_TUNE") == "1" else []),
            "-std=c++17",
            "-O3",
            "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
            "-ccbin",
            self.cxx,
            *gencode,
            *compile_flags,
        ]
        objects = [
            add_build(ninja, folder / f"cuda_{source.stem}.o", "nvcc", [source], flags)
            for source in sorted((SOURCES / "cuda").glob("*.cu"))
        ]
        host = COMMON_FLAGS + ["-O2", "-DUSE_CUDA", *self.torch_flags()]
        source = SOURCES / "cuda" / "operators.cpp"
        objects.append(add_build(ninja, folder / "cuda_operators.o", "cxx", [source], host))
        libraries = self.torch_libraries("torch_cuda", "torch_cpu", "torch")
        return add_build(
            ninja, folder / "_ops_cuda.so", "nvlink", objects, ["-ccbin", self.cxx, *link_flags, *libraries]
        )

    def facts_module(self, ninja, folder: Path, nvcc: str | None, out: Path) -> Path:
        facts = {
            "KFC_COMPILER": first_line([self.cxx, "--version"]),
            "KFC_CUDA": re.findall(r"release ([\d.]+)", run_text([nvcc, "--version"]))[0] if nvcc else "",
            "KFC_CUDA_ARCHS": " ".join(cuda_archs()) if nvcc else "",
            "KFC_TORCH": torch_version(self.torch),
            "KFC_TORCH_TARGET": TORCH_TARGET,
        }
        header = folder / "build_facts.h"
        text = "".join(f"#define {name} {json.dumps(value)}\n" for name, value in facts.items())
        if not header.exists() or header.read_text() != text:
            header.write_text(text)
        includes = [
            "-isystem",
            sysconfig.get_path("include"),
            "-isystem",
            f"{package_dir('pybind11')}/include",
        ]
        flags = [*COMMON_FLAGS, "-O2", *includes, f"-I{folder}"]
        compiled = add_build(ninja, folder / "bindings.o", "cxx", [SOURCES / "bindings.cpp"], flags)
        return add_build(ninja, out, "link", [compiled], [])


def run_text(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def first_line(command: list[str]) -> str:
    return run_text(command).splitlines()[0]


def torch_version(torch: Path) -> str:
    return re.findall(r"__version__\s*=\s*['\"]([^'\"]+)", (torch / "version.py").read_text())[0]


PLAN = Plan()


class BuildWithNinja(build_ext):
    """Runs ninja, then puts its outputs into the source tree (in-place and editable) or into the wheel."""

    def run(self):
        folder = ROOT / "build" / "ninja"
        outputs = PLAN.write(folder)
        jobs = os.environ.get("MAX_JOBS", "2")
        subprocess.run([PLAN.ninja, "-C", str(folder), "-j", jobs, *map(str, outputs.values())], check=True)
        target = ROOT / "kfconvert" if self.inplace else Path(self.build_lib).resolve() / "kfconvert"
        target.mkdir(parents=True, exist_ok=True)
        self.installed = []
        for name, built in outputs.items():
            # A rename, not a write: a process that has the old file loaded keeps it.
            partial = target / f"{name}.partial"
            shutil.copy2(built, partial)
            os.replace(partial, target / name)
            self.installed.append(str(target / name))

    def get_outputs(self):
        return getattr(self, "installed", [])

    def get_output_mapping(self):
        return {}


extensions = [Extension("kfconvert._C", ["kfconvert/csrc/bindings.cpp"])] if PLAN.possible else []
setup(ext_modules=extensions, cmdclass={"build_ext": BuildWithNinja})
