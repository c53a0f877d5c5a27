"""The bodies for NEON on other machines: cross-compiled and emulated, against double."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
KERNELS = Path(__file__).parents[1] / "src" / "t5_ternary" / "kernels"


@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}")
def test_neon_bodies(tmp_path):
    asked = [sys.executable, "-m", "backend_core", "--include-dir"]
    include = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    program = tmp_path / "bodies"
    flags = ["-std=c++20", "-O1", "-static", "-ffp-contract=off", f"-I{include}", f"-I{KERNELS}"]
    sources = [Path(__file__).parent / "neon_bodies.cpp", KERNELS / "neon.cpp"]
    subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "results compared, 0 wrong" in done.stdout and not done.stdout.startswith("0 ")
