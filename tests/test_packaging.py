"""A wheel, installed away from the checkout, holds all four folders as one package, and the native kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("vllm_ktx", "attention_backends", "kv_quant", "offload")
COMPILER = shutil.which("c++") or shutil.which("g++")


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def copy_of_the_sources(folder: Path) -> Path:
    """What git would hand out, roughly: no build products, so nothing stale can end up in the wheel."""
    for name in FOLDERS:
        products = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, ignore=products)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    return folder


def install_wheel(sources: Path, target: Path, **environment: str) -> list[str]:
    """Builds a wheel (with the environment's setuptools, so no network), installs it to target, lists its files."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    environ = os.environ | environment
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", target / "wheels", sources, env=environ)
    (wheel,) = (target / "wheels").glob("*.whl")
    run(*pip, "install", "-q", "--no-deps", "--no-index", "--target", target / "site", wheel)
    return sorted(str(path.relative_to(target / "site")) for path in (target / "site").rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    target = tmp_path_factory.mktemp("installed")
    return target / "site", install_wheel(copy_of_the_sources(tmp_path_factory.mktemp("sources")), target)


def test_the_wheel_holds_one_package_and_nothing_else_at_the_top(installed):
    _, files = installed
    tops = {name.split("/")[0] for name in files} - {"bin"}
    assert tops == {"vllm_ktx", "vllm_ktx-0.1.0.dist-info"}
    assert "vllm_ktx/py.typed" in files
    assert not [name for name in files if name.endswith((".cpp", ".h"))]


def test_every_package_imports_from_outside_the_checkout(installed, tmp_path):
    site, _ = installed
    names = ("vllm_ktx", *(f"vllm_ktx.{name}" for name in FOLDERS[1:]), "vllm_ktx.attention_backends.cpu")
    code = f"import importlib\nfor name in {names!r}: print(importlib.import_module(name).__file__)"
    where = run(sys.executable, "-c", code, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}).split()
    assert len(where) == len(names) and all(path.startswith(str(site)) for path in where)


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.skipif(not list((ROOT / "attention_backends/cpu/csrc").glob("*.cpp")), reason="no native sources")
def test_the_wheel_holds_a_native_library_that_loads(installed, tmp_path):
    site, files = installed
    (library,) = [name for name in files if name.startswith("vllm_ktx/attention_backends/cpu/_native")]
    # torch first: the library finds its OpenMP runtime there, instead of bringing a second one.
    code = f"""import ctypes, torch, glob, os
for name in glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*")) + glob.glob(
        os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "torch.libs", "libgomp*")):
    ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
print(ctypes.CDLL({str(site / library)!r}))"""
    assert "CDLL" in run(sys.executable, "-c", code, cwd=tmp_path)


def test_without_a_compiler_the_install_succeeds(tmp_path):
    sources = tmp_path / "sources"
    sources.mkdir()
    copy_of_the_sources(sources)
    files = install_wheel(sources, tmp_path, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert "vllm_ktx/__init__.py" in files
    assert not [name for name in files if "_native" in name]
