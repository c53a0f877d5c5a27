"""The example plugins: what the documentation shows is what is there, and it works."""

from __future__ import annotations

import importlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_models
import toys
from helpers import distribution, python

from backend_core import Policy, accelerate, cpu_kernel, like, native, restore
from backend_core.__main__ import sdk_dir
from backend_core.testing.lab import report_command
from backend_core.testing.lab_device import lab_device, select

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TEN, C, GPU = (EXAMPLES / name for name in ("ten_line_plugin", "c_kernel_plugin", "gpu_kernel_plugin"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

DETERMINISTIC = Policy(deterministic=True, strict=True)
needs_c = [
    pytest.mark.skipif(not native.available(), reason=native.status().reason or "native"),
    pytest.mark.skipif(CC is None, reason="needs a C compiler"),
]


def shown() -> list[tuple[str, str]]:
    """(file, text) of every block after ``<!-- file: PATH -->``."""
    pattern = r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$"
    return [b for p in PAGES for b in re.findall(pattern, p.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)]


def test_the_documentation_shows_the_very_files() -> None:
    for file, block in shown():
        assert (ROOT / file).read_text(encoding="utf-8") == block, f"{file} is shown differently"
    suffixes = ("*.py", "*.c", "*.metal", "*.toml", "*.txt")
    files = {p for folder in (TEN, C, GPU) for s in suffixes for p in folder.rglob(s)}
    files = {p for p in files if not {"build", "dist"} & set(p.relative_to(EXAMPLES).parts)}
    assert {str(p.relative_to(ROOT)) for p in files} == {file for file, _ in shown()}


# Ten lines


@pytest.fixture
def ten(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TEN))
    yield importlib.import_module("float32_products")
    sys.modules.pop("float32_products", None)


def test_the_hook_has_ten_lines() -> None:
    source = (TEN / "float32_products.py").read_text(encoding="utf-8")
    body = source[source.index("@hookimpl") :]
    assert len([line for line in body.splitlines() if line.strip()]) == 10


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ten_lines_serve_quantized_layers_in_half_precision(ten: ModuleType, dtype: str, bits: int) -> None:
    mx.random.seed(1)
    model = nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 32, bias=False))
    nn.quantize(model, group_size=32, bits=bits)
    model.set_dtype(getattr(mx, dtype))
    x = mx.random.normal((3, 96)).astype(getattr(mx, dtype))
    stock = model(x)
    report = accelerate(model, DETERMINISTIC, host=toys.host(DETERMINISTIC, float32_products=ten))
    assert {d.chosen for d in report.decisions} == {"float32_products/wide"}
    y = model(x)
    assert y.dtype == stock.dtype and y.shape == stock.shape
    assert restore(model) == 2
    assert mx.array_equal(model(x), stock)


def test_ten_lines_win_their_race(ten: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(256, 512))
    nn.quantize(model, group_size=64, bits=4)
    model.set_dtype(mx.float16)
    report = accelerate(model, Policy(), host=toys.host(Policy(), float32_products=ten))
    [decision] = report.decisions
    if decision.site.device == "cpu" and platform.machine() == "x86_64":
        assert decision.chosen == "float32_products/wide" and decision.ratio > 1


def test_ten_lines_decline_what_they_do_not_serve(ten: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    host = toys.host(DETERMINISTIC, float32_products=ten)
    for mode in ("dense", "affine"):
        report = accelerate(model, DETERMINISTIC, host=host)
        assert [(d.site.mode, d.accelerated) for d in report.decisions] == [(mode, False)] * 2
        restore(model)
        if mode == "dense":
            nn.quantize(model, group_size=32, bits=4)  # float32 scales and activations


def test_a_model_runs_with_ten_lines(ten: ModuleType) -> None:
    policy = Policy(deterministic=True, strict=True, activations="model")
    model = tiny_models.build("llama", bits=4, dtype="float16", tie_word_embeddings=False)
    wide = tiny_models.build("llama", bits=4, dtype="float16", tie_word_embeddings=False)
    accelerate(model, policy, host=toys.host(policy, float32_products=ten))
    for got, want in zip(tiny_models.logits(model), tiny_models.logits(wide), strict=True):
        assert got.dtype == want.dtype
        assert mx.abs(got - want).max().item() < 0.05 * mx.abs(want).max().item()


def test_ten_lines_are_found_through_their_entry_point(tmp_path: Path) -> None:
    project = (TEN / "pyproject.toml").read_text(encoding="utf-8")
    entry = re.search(r'\[project.entry-points."mlx_accel.plugins"\]\n(\w+) = "(\w+)"', project)
    assert entry is not None
    source = (TEN / "float32_products.py").read_text(encoding="utf-8")
    path = distribution(tmp_path, "float32_products", plugins={entry[1]: entry[2]}, files={f"{entry[2]}.py": source})
    done = python("-m", "backend_core", "plugins", "-o", "plugins=float32_products", path=[path])
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "float32_products" in line]
    assert "select_linear" in line and "ready" in line


# A kernel in C


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the C example beside a library that plain `cc` has made."""
    root = tmp_path_factory.mktemp("c_kernel_plugin")
    package = shutil.copytree(C / "src" / "bf16_linear", root / "bf16_linear")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    source = package / "kernels" / "bf16_linear.c"
    subprocess.run(
        [str(CC), "-std=c11", "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{sdk_dir('include')}",
         str(source), "-o", str(source.with_suffix(f".{suffix}"))],
        check=True,
    )  # fmt: skip
    return root


@pytest.fixture
def bf16(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(built))
    yield importlib.import_module("bf16_linear")
    sys.modules.pop("bf16_linear", None)


class TestC:
    pytestmark = needs_c

    @pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 9, 16), (5, 33, 47), (20, 8, 128)])
    def test_kernel(self, bf16: ModuleType, m: int, n: int, k: int) -> None:
        rng = np.random.default_rng(0)
        x = mx.array(rng.standard_normal((m, k)).astype(np.float32))
        w = mx.array(rng.standard_normal((n, k)).astype(np.float32)).astype(mx.bfloat16)
        kernel = cpu_kernel(bf16.library(), "bf16_linear")
        [y] = kernel(inputs=[x, w], output_shapes=[like(0, last=n)], output_dtypes=[like(0)])
        w64 = np.array(w.astype(mx.float32)).astype(np.float64)
        np.testing.assert_allclose(np.array(y), np.array(x).astype(np.float64) @ w64.T, rtol=1e-5, atol=1e-5)
        if m > 1:  # row-invariant
            [one] = kernel(inputs=[x[-1:], w], output_shapes=[like(0, last=n)], output_dtypes=[like(0)])
            assert np.array(one).tobytes() == np.array(y[-1:]).tobytes()

    def test_it_says_what_it_cannot_do(self, bf16: ModuleType) -> None:
        kernel = cpu_kernel(bf16.library(), "bf16_linear")
        x = mx.zeros((2, 4), mx.float16)
        mx.eval(kernel(inputs=[x, x], output_shapes=[(2, 2)], output_dtypes=[mx.float32]))
        assert native.take_errors() == ["bf16_linear: needs x in float32 and a bfloat16 matrix"]

    def test_a_model_runs_with_it(self, bf16: ModuleType) -> None:
        policy = Policy(deterministic=True, strict=True, activations="float32")
        model = tiny_models.build("llama", dtype="bfloat16", tie_word_embeddings=False)
        stock_policy = Policy(plugins="none", activations="float32")
        accelerate(model, stock_policy, host=toys.host(stock_policy))
        want = tiny_models.logits(model)
        report = accelerate(model, policy, host=toys.host(policy, bf16_linear=bf16))
        assert {d.chosen for d in report.decisions if d.site.hook != "join"} == {"bf16_linear/c"}
        for a, b in zip(tiny_models.logits(model), want, strict=True):
            assert mx.abs(a - b).max().item() <= 1e-4 * mx.abs(b).max().item()

    def test_gradients_are_stocks(self, bf16: ModuleType) -> None:
        mx.random.seed(2)
        model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 8, bias=False))
        model.set_dtype(mx.bfloat16)
        x = mx.random.normal((3, 48), key=mx.random.key(3))
        gradient = mx.grad(lambda v: (model(v) ** 2).sum())
        want = gradient(x)
        calls = [bf16.build(layer) for layer in model.layers]
        got = mx.grad(lambda v: (calls[1](calls[0](v)) ** 2).sum())(x)
        assert mx.abs(got - want).max().item() <= 1e-4 * mx.abs(want).max().item()

    def test_it_is_built_as_a_wheel(self, tmp_path: Path) -> None:
        pytest.importorskip("scikit_build_core")
        if shutil.which("cmake") is None and not (Path(sys.executable).parent / "cmake").exists():
            pytest.skip("needs cmake")
        # The build leaves files in the source directory.
        source = shutil.copytree(C, tmp_path / "source", ignore=shutil.ignore_patterns("build", "dist"))
        done = subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-build-isolation", "--no-deps",
             "-w", str(tmp_path / "wheels"), str(source)],
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        [wheel] = (tmp_path / "wheels").glob("*.whl")
        assert "-py3-none-" in wheel.name
        with zipfile.ZipFile(wheel) as z:
            names = set(z.namelist())
            z.extractall(tmp_path / "site")
        assert {"bf16_linear/__init__.py", "bf16_linear/mlx_accel.toml"} <= names
        assert [n for n in names if n.endswith((".so", ".dylib"))] and not [n for n in names if n.endswith(".c")]
        done = python("-m", "backend_core", "plugins", "-o", "plugins=bf16_linear", path=[tmp_path / "site"])
        assert done.returncode == 0, done.stderr
        [line] = [line for line in done.stdout.splitlines() if "bf16_linear" in line]
        assert "bf16_linear (cpu)" in line and "ready" in line


# A GPU kernel


@pytest.fixture
def gpu_plugin(lab_compiler: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(GPU / "src"))
    yield importlib.import_module("dense_gpu")
    for name in ("dense_gpu", "dense_gpu.kernel"):
        sys.modules.pop(name, None)


def test_the_gpu_kernel_s_report_is_the_one_that_is_shown(gpu_plugin: ModuleType) -> None:
    [shown] = re.findall(r"of the first case:\n\n```\n(.*?)\n```$", (ROOT / "docs/simt.md").read_text(), re.M | re.S)
    case = next(iter(gpu_plugin.cases()))
    printed = "\n".join(report_command.lines([report_command.run(gpu_plugin.DENSE_QMV, case)]))
    printed = re.sub(r"\n  not checked: types: .*", "", printed)  # without a clang
    assert re.sub(r"[\d.]+ s$", "", printed) == re.sub(r"[\d.]+ s$", "", shown)


@pytest.mark.parametrize("device", ["metal", "cuda"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_gpu_kernel_wins_where_times_do_not_count(gpu_plugin: ModuleType, device: str, dtype: str) -> None:
    mx.random.seed(1)
    model = nn.Sequential(nn.Linear(264, 7, bias=False), nn.Linear(7, 16))
    model.set_dtype(getattr(mx, dtype))
    weight = model.layers[0].weight.astype(mx.float32)
    with lab_device(device) as gpu:
        report = select(model, gpu_plugin, "dense_gpu")
        assert report.decision("layers.0").chosen == f"dense_gpu/dense_{device}"
        assert report.decision("layers.1").chosen == "stock"  # k is no multiple of 8
        for rows, step in ((1, 1), (3, 4), (16, 16)):
            x = mx.random.normal((rows, 264)).astype(getattr(mx, dtype))
            gpu.calls.clear()
            y = model.layers[0](x)
            assert [call.rows for call in gpu.calls] == [step]
            want = x.astype(mx.float32) @ weight.T
            assert mx.abs(y - want).max().item() < 2.0**-7 * mx.abs(want).max().item()
        gpu.calls.clear()
        model.layers[0](mx.zeros((17, 264), getattr(mx, dtype)))
        assert not gpu.calls and not gpu.failed
