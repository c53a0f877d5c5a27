"""The native module: status, probe, instruction sets, tracing, the float64 references, the SDK's paths."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx.core")
import mlx.core as mx

from backend_core import native

needs_native = pytest.mark.skipif(not native.available(), reason=native.status().reason or "native")


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


STATUS = (
    "from backend_core import native; import dataclasses, json; print(json.dumps(dataclasses.asdict(native.status())))"
)


def status_with(**environment: str) -> dict:
    return json.loads(python(STATUS, **environment))


# Status


@needs_native
def test_status():
    status = native.status()
    assert status.available and status.reason == "" and native.available()
    assert status.build["mlx"] == mx.__version__
    assert status.build["kernel_abi"] >= 1 and status.build["nanobind"] and status.build["compiler"]
    assert status.threads >= 1 and len(status.content_hash) == 16
    assert native.get() is sys.modules["backend_core._native"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        status.available = False


def test_importing_costs_no_mlx():
    code = "import sys, backend_core.native, backend_core.cpu_kernel; print('mlx.core' in sys.modules)"
    assert python(code) == "False"


def test_switched_off():
    status = status_with(MLX_ACCEL_NATIVE="0")
    assert not status["available"] and "MLX_ACCEL_NATIVE=0" in status["reason"]
    code = (
        "from backend_core import native, cpu_kernel\n"
        "assert native.take_errors() == [] and not native.in_tracing() and not native.in_dynamic_tracing()\n"
        "try: cpu_kernel('k.so', 'k')\n"
        "except native.NativeUnavailable as e: print(e)"
    )
    assert "unset it" in python(code, MLX_ACCEL_NATIVE="0")


@pytest.fixture
def reload(monkeypatch):
    """Loads again with another module in place of the real one."""

    def load(**changes):
        real = native.get()
        fake = types.SimpleNamespace(**{k: getattr(real, k) for k in dir(real)})
        for key, value in changes.items():
            setattr(fake, key, value)
        monkeypatch.setattr(native, "_import", lambda: fake)
        return native._load.__wrapped__()[1]

    return load


def raiser(error):
    def f(*args, **kwargs):
        raise error

    return f


@needs_native
def test_every_fault_becomes_one_sentence(reload):
    build = native.get().build_info()
    faults = {
        "built for mlx 0.1.2, and mlx": {"build_info": lambda: {**build, "mlx": "0.1.2"}},
        "another nanobind": {"abi_probe": raiser(TypeError("incompatible function arguments"))},
        "misreads": {"abi_probe": lambda a: ((3, 2), 6, 4, 2, 10)},
        "MLX_ACCEL_ISA": {"isa": raiser(ValueError("MLX_ACCEL_ISA=x is not a level"))},
        "RuntimeError: no": {"Kernel": raiser(RuntimeError("no"))},
        "computes wrongly": {"Call": lambda *a, **k: lambda *a, **k: [mx.zeros((2, 3))]},
    }
    for text, change in faults.items():
        status = reload(**change)
        assert not status.available and text in status.reason and "\n" not in status.reason
        assert status.threads == 0 and status.isa == ""
    assert reload().available


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModuleNotFoundError("No module named 'backend_core._native'"), "without its native module"),
        (ImportError("cannot import name '_native' from 'backend_core'"), "without its native module"),
        (ImportError("libmlx.so: undefined symbol: _ZN3mlx"), "undefined symbol"),
    ],
)
def test_import_faults(monkeypatch, error, text):
    real = __import__

    def fake(name, globals=None, locals=None, fromlist=(), level=0):
        if "_native" in (fromlist or ()):
            raise error
        return real(name, globals, locals, fromlist, level)

    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("builtins.__import__", fake)
    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    module, status = native._load.__wrapped__()
    assert module is None and text in status.reason and "mlx-accel" in status.reason


@needs_native
def test_a_checkout_finds_the_installed_module(tmp_path):
    """Inside a source tree `python -m` imports its backend_core, which has no compiled part."""
    root = Path(native.__file__).parent
    shutil.copytree(root, tmp_path / "backend_core", ignore=shutil.ignore_patterns("_native*", "__pycache__"))
    code = "import backend_core, sys; from backend_core import native; print(backend_core.__file__, native.status())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    # An editable install wins over the directory; then there is nothing to find.
    assert "available=True" in result.stdout, result.stdout + result.stderr


# Instruction sets

X86 = native.available() and any(n.startswith("avx") for n in native.status().isa_names)


@needs_native
def test_isa():
    bits, level, names = native.get().isa()
    assert bin(bits).count("1") == len(names)
    assert level == "portable" or level in names


@needs_native
@pytest.mark.parametrize("level", ["portable", "avx2", "avx512", "avx512_vnni", "neon", "neon_dotprod", "native"])
def test_isa_cap(level):
    status = status_with(MLX_ACCEL_ISA=level)
    foreign = level.startswith("neon" if os.uname().machine in ("x86_64", "amd64") else "avx")
    if foreign:
        assert not status["available"] and "portable" in status["reason"] and level in status["reason"]
        return
    assert status["available"], status
    all_names = set(native.status().isa_names) if "MLX_ACCEL_ISA" not in os.environ else set(status["isa_names"])
    assert set(status["isa_names"]) <= all_names
    if level == "portable":
        assert status["isa_names"] == [] and status["isa"] == "portable"
    elif level == "native":
        assert set(status["isa_names"]) == all_names
    else:
        assert level not in all_names or status["isa"] == level
        assert "avx512_bf16" not in status["isa_names"] and "amx_int8" not in status["isa_names"]


@needs_native
def test_bad_isa():
    status = status_with(MLX_ACCEL_ISA="sse9")
    assert not status["available"]
    assert all(text in status["reason"] for text in ("MLX_ACCEL_ISA=sse9", "native", "portable"))
    assert status_with(MLX_ACCEL_ISA="")["available"]


# Tracing


@needs_native
def test_tracing(tmp_path):
    seen = []
    other = mx.zeros((2, 3))

    def f(x):
        states = (native.in_tracing(x), native.in_tracing(), native.in_dynamic_tracing())
        seen.append((*states, native.in_tracing(other)))
        return x * 2

    x = mx.ones((2, 3))
    mx.eval(x, other)

    def after(run):
        seen.clear()
        run()
        assert len(seen) == 1
        return seen[0]

    nothing, traced, dynamic = (False,) * 4, (True, True, False, False), (True, True, True, False)
    path = str(tmp_path / "f.mlxfn")
    assert after(lambda: f(x)) == nothing
    assert after(lambda: mx.compile(f)(x)) == traced
    assert after(lambda: mx.compile(f, shapeless=True)(x)) == dynamic
    assert after(lambda: mx.grad(lambda a: f(a).sum())(x)) == traced
    assert after(lambda: mx.vjp(f, [x], [x])) == traced
    assert after(lambda: mx.jvp(f, [x], [x])) == traced
    assert after(lambda: mx.vmap(f)(x)) == traced
    assert after(lambda: mx.export_function(path, f, x)) == traced
    assert after(lambda: mx.export_function(path, f, x, shapeless=True)) == dynamic
    assert after(lambda: mx.compile(mx.grad(lambda a: f(a).sum()), shapeless=True)(x)) == dynamic
    assert after(lambda: mx.compile(lambda a: mx.compile(f)(a), shapeless=True)(x)) == dynamic
    assert after(lambda: f(x)) == nothing
    compiled = mx.compile(f)
    compiled(x)
    seen.clear()
    compiled(x)  # replayed without Python
    assert seen == []


@needs_native
def test_tracing_leaves_no_mark_after_an_error():
    with pytest.raises(ZeroDivisionError):
        mx.compile(lambda a: 1 / 0, shapeless=True)(mx.ones(2))
    assert not native.in_tracing() and not native.in_dynamic_tracing()


# float64 references


def decode_stream(w: np.ndarray, bits: int) -> np.ndarray:
    """Codes of a little-endian bit stream, one bit at a time."""
    flat = np.unpackbits(w.view(np.uint8), axis=1, bitorder="little")
    n, total = flat.shape
    weights = 1 << np.arange(bits)
    return (flat.reshape(n, total // bits, bits) * weights).sum(-1)


def affine_case(bits, group, m, n, groups, seed):
    rng = np.random.default_rng(seed)
    k = group * groups
    w = rng.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32)
    scales, biases = (rng.normal(size=(n, groups)).astype(np.float32) for _ in range(2))
    return rng.normal(size=(m, k)), w, scales, biases


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([1, 2, 3, 4, 5, 6, 8]),
    group=st.sampled_from([32, 64, 96, 128]),
    m=st.integers(0, 35),
    n=st.integers(0, 40),
    groups=st.integers(1, 20),
    data=st.data(),
)
def test_affine_reference(bits, group, m, n, groups, data):
    x, w, scales, biases = affine_case(bits, group, m, n, groups, m + n)
    begin = data.draw(st.integers(0, n))
    end = data.draw(st.integers(begin, n))
    y, magnitude = native.get().affine_reference(x, w, scales, biases, bits, group, begin, end)
    assert y.shape == magnitude.shape == (m, end - begin)
    s, b = (np.repeat(a.astype(np.float64), group, axis=1) for a in (scales, biases))
    weights = (s * decode_stream(w, bits) + b)[begin:end] if n else np.zeros((0, x.shape[1]))
    expected, total = x @ weights.T, np.abs(x) @ np.abs(weights).T
    tolerance = 1e-14 * (total.max(initial=0) + 1e-30) * 4
    np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(magnitude, total, rtol=1e-12)


@needs_native
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_affine_reference_reads_what_mlx_writes(bits, group):
    dense = mx.random.normal((48, 256), key=mx.random.key(bits))
    try:
        w, scales, biases = mx.quantize(dense, group, bits)
        expected = np.array(mx.dequantize(w, scales, biases, group, bits))
    except ValueError:  # a combination that this mlx does not know
        pytest.skip(f"mlx has no {bits}-bit groups of {group}")
    identity = np.eye(256)
    y, magnitude = native.get().affine_reference(
        identity, np.array(w), np.array(scales), np.array(biases), bits, group, 0, 48
    )
    np.testing.assert_allclose(y.T, expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(magnitude, np.abs(y))


@needs_native
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_references_have_the_same_bits_everywhere(bits):
    code = (
        "import numpy as np, hashlib\n"
        "from backend_core import native\n"
        "m = native.get(); rng = np.random.default_rng(0); h = hashlib.sha256()\n"
        f"bits = {bits}; x = rng.normal(size=(3, 640))\n"
        "w = rng.integers(0, 2**32, (70, 640 * bits // 32), dtype=np.uint32)\n"
        "s, b = (rng.normal(size=(70, 10)).astype(np.float32) for _ in range(2))\n"
        "for part in (x, x[:1]):\n"
        "    h.update(b''.join(a.tobytes() for a in m.affine_reference(part, w, s, b, bits, 64)))\n"
        "w = rng.normal(size=(9, 640)).astype(np.float32)\n"
        "h.update(b''.join(a.tobytes() for a in m.dense_reference(x, w)))\n"
        "print(h.hexdigest())"
    )
    levels = ["portable", "avx2", "avx512"] if X86 else ["portable", "native"]
    digests = {python(code, MLX_ACCEL_ISA=level, MLX_ACCEL_THREADS=str(1 + i)) for i, level in enumerate(levels)}
    assert len(digests) == 1


@needs_native
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 20),
    n=st.integers(0, 20),
    k=st.integers(0, 1100),
    dtype=st.sampled_from(["float16", "float32", "bfloat16"]),
)
def test_dense_reference(m, n, k, dtype):
    rng = np.random.default_rng(k)
    x = rng.normal(size=(m, k))
    w = rng.normal(size=(n, k)).astype(np.float32)
    if dtype == "bfloat16":
        stored = (w.view(np.uint32) >> 16).astype(np.uint16)
        values = (stored.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "float16":
        values = w.astype(np.float16)
        stored = values.view(np.uint16)
    else:
        stored = values = w
    y, magnitude = native.get().dense_reference(x, stored, dtype)
    values = values.astype(np.float64)
    total = np.abs(x) @ np.abs(values).T
    np.testing.assert_allclose(y, x @ values.T, rtol=0, atol=1e-13 * (total.max(initial=0) + 1))
    np.testing.assert_allclose(magnitude, total, rtol=1e-12)


@needs_native
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_value(dtype):
    every = np.arange(65536, dtype=np.uint16).reshape(-1, 1)
    y, _ = native.get().dense_reference(np.ones((1, 1)), every, dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        if dtype == "float16":
            expected = every.view(np.float16).astype(np.float64)
        else:
            expected = (every.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    np.testing.assert_array_equal(y, expected.T)


@needs_native
def test_reference_errors():
    x, w, s, b = affine_case(4, 32, 2, 3, 2, 0)
    f = native.get().affine_reference
    f(x, w, s, b, 4, 32)
    for args in [
        (x, w, s, b, 7, 32),
        (x, w, s, b, 4, 31),
        (x, w, s, b, 4, 0),
        (x, w, s, b, 3, 32),
        (x, w, s, b, 4, 64),
        (x, w, s, b[:2], 4, 32),
        (x, w, s, b, 4, 32, 2, 1),
        (x, w, s, b, 4, 32, 0, 4),
        (x, w, s, b, 4, 32, -1, 2),
    ]:
        with pytest.raises(ValueError):
            f(*args)
    for args in [(x, w.astype(np.int64), s, b, 4, 32), (x, w[:, ::-1], s, b, 4, 32), (x[0], w, s, b, 4, 32)]:
        with pytest.raises(TypeError):
            f(*args)
    for dense, dtype in [
        (s.astype(np.float16), "float16"),
        (s.astype(np.float64), "float32"),
        (s[0], "float32"),
    ]:
        with pytest.raises(TypeError, match="w must be"):
            native.get().dense_reference(x, dense, dtype)
    with pytest.raises(ValueError, match="dtype must be"):
        native.get().dense_reference(x, s, "int8")


# The SDK's paths


def test_sdk_directories():
    run = [sys.executable, "-m", "backend_core"]
    include = subprocess.run([*run, "--include-dir"], capture_output=True, text=True, check=True).stdout.strip()
    assert os.path.isfile(os.path.join(include, "accel", "kernel.h"))
    cmake = subprocess.run([*run, "--cmake-dir"], capture_output=True, text=True, check=True).stdout.strip()
    assert os.path.isfile(os.path.join(cmake, "mlx_accelConfig.cmake"))
    code = (
        "import sys\nfrom backend_core.__main__ import main\nmain(['--cmake-dir'])\n"
        "assert 'mlx' not in sys.modules and 'numpy' not in sys.modules"
    )
    assert python(code) == cmake


def test_sdk_missing(monkeypatch, tmp_path, capsys):
    from backend_core import __main__ as entry

    monkeypatch.setattr(entry, "__file__", str(tmp_path / "backend_core" / "__main__.py"))
    assert entry.main(["--cmake-dir"]) == 1
    assert "SDK is not installed" in capsys.readouterr().err
