"""The peer's side of the benchmarks: found or missing, a stand-in for it, and the real one where there is one.

Tests of the real peer need a llama.cpp build: LLAMA_CPP_BUILD=DIR pytest tests/test_bench_peer.py
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from click.testing import CliRunner

from backend_core.bench import attention, floors, generate, linear, llama_bench, ops, peer, peer_work, random_models
from backend_core.bench.layers import LinearSpec
from backend_core.cli import main
from backend_core.policy import Policy

BUILD = os.environ.get("LLAMA_CPP_BUILD", "")
needs_peer = pytest.mark.skipif(not BUILD, reason="needs a llama.cpp build: LLAMA_CPP_BUILD=DIR")


@pytest.fixture(autouse=True)
def small_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(floors, "_FMA_S", 1e-4)


def fake_build(directory: Path, body: str) -> Path:
    """A build directory whose llama-bench is a Python program."""
    program = directory / "bin" / "llama-bench"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport json, os, sys\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return directory


ECHO = """
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
count = max(int(words["-p"]), int(words["-n"]))
slow = 2 if words.get("-fa") == "on" else 1
print(json.dumps([{"samples_ns": [slow * 1_000_000 * count] * int(words["-r"])}]))
"""


# What is missing


def test_missing_parts_are_named(tmp_path) -> None:
    cases = [(tmp_path / "no", "is not a directory"), (tmp_path, "no libggml-base.so")]
    for directory, message in cases:
        result = CliRunner().invoke(main, ["bench", "linear", "--peers", str(directory)])
        assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr
    with pytest.raises(peer.PeerError, match="there is no llama-bench below"):
        llama_bench.run(tmp_path, tmp_path / "m.gguf", 1, tokens=1)


def test_libraries_without_the_functions_are_an_error(tmp_path) -> None:

    libc = next((p for p in ("/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6") if Path(p).exists()), None)
    if libc is None:
        pytest.skip("no libm to stand in")
    for name in ("libggml-base.so", "libggml.so"):
        (tmp_path / name).symlink_to(libc)
    with pytest.raises(peer.PeerError, match="have no ggml_version; they are too old"):
        peer.Ggml(tmp_path, 1)


# llama-bench


def test_llama_bench_is_called_and_read(tmp_path) -> None:
    build = fake_build(tmp_path, ECHO)
    assert llama_bench.run(build, tmp_path / "m.gguf", 2, prompt=512, depth=64, repeats=3) == [1e-3] * 3
    assert llama_bench.run(build, tmp_path / "m.gguf", 2, tokens=16, extra=("-fa", "on")) == [2e-3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('cannot load', file=sys.stderr); sys.exit(3)", "exit code 3: cannot load"),
        ("import signal; os.kill(os.getpid(), signal.SIGILL)", "signal 4: no message"),
        ("print('hello')", "output is not understood"),
        ("print('[{}]')", "output is not understood"),
    ],
)
def test_failures_of_llama_bench_are_errors(body, message, tmp_path) -> None:
    with pytest.raises(peer.PeerError, match=message):
        llama_bench.run(fake_build(tmp_path, body), tmp_path / "m.gguf", 1, tokens=4)


def test_whole_models_against_a_stand_in(tmp_path, installed_plugins) -> None:
    build = fake_build(tmp_path, ECHO)
    tasks = (generate.Task("decode", 4), generate.Task("prompt", 20), generate.Task("decode", 3, 30),
             generate.Task("prompt", 8, 30), generate.Task("decode", 4, busy=True))  # fmt: skip
    source = generate.Source("tiny", tasks, lambda: tiny_models.build("llama", bits=4), lambda: tmp_path / "m", "Q4_1")
    options = generate.Options(repeats=2, settle=0.0)
    rows = generate.bench_models([source], options, Policy.from_options(()), build, floors.Floors())
    assert [r.work for r in rows] == ["tiny decode 4", "tiny prompt of 20", "tiny decode 3 at 30",
                                      "tiny prompt of 8 at 30", "tiny decode 4, one CPU busy"]  # fmt: skip
    for row in rows:
        [p] = row.of("peer")
        assert p.median == 1e-3 and p.detail.endswith("-fa off") and row.ours is not None and len(row.ours.samples) == 2
        assert row.facts["flash_attention"]["on"][0] == 2e-3
    assert rows[0].stock is not None and rows[2].stock is None
    # keys and values of 2 layers with 2 heads of 32, 16-bit
    assert rows[2].ours.bytes_moved - rows[0].ours.bytes_moved == 2 * 2 * 2 * 2 * 32 * (30 + 3 // 2 - 4 // 2)
    only = generate.bench_models([source], options, Policy.from_options(()), wanted=lambda name: "prompt of 20" in name)
    assert [r.work for r in only] == ["tiny prompt of 20"] and not only[0].of("peer")


def test_generate_needs_the_peers_file_of_an_own_model(tmp_path, monkeypatch) -> None:
    class NoGgml:
        release = "0"

        def __init__(self, *args: Any) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(peer, "Ggml", NoGgml)
    result = CliRunner().invoke(main, ["bench", "generate", "--model", str(tmp_path), "--peers", str(tmp_path)])
    assert result.exit_code == 2 and "--gguf" in result.stderr


# Linear layers against a stand-in for ggml


class FakeGgml:
    """Knows sizes, multiplies nothing."""

    release = "fake"

    def block(self, kind: str) -> int:
        return 256

    def matrix_bytes(self, kind: str, n: int, k: int) -> int:
        return n * k // 2

    def quantized(self, kind: str, values: np.ndarray) -> bytes:
        return b"\0" * (values.size // 2)


class FakeWork:
    closed = 0

    def run(self) -> float:
        time.sleep(1e-4)
        return 1e-3

    def close(self) -> None:
        FakeWork.closed += 1


def test_linear_against_a_stand_in(monkeypatch, installed_plugins) -> None:
    monkeypatch.setattr(linear, "best_mul_mat", lambda *a: (FakeWork(), "plain"))
    work = [linear.Work(LinearSpec(64, 256, 4, 64), m, ("q4_K", "q4_0")) for m in (1, 20)]
    work.append(linear.Work(LinearSpec(64, 128, 2, 128), 1, ("tq2_0",)))  # 128 is no multiple of the peer's block
    options = linear.Options(repeats=3, weights_bytes=1 << 16, settle=0.0)
    rows = linear.bench_linear(work, options, Policy.from_options(()), FakeGgml(), floors.Floors())  # type: ignore[arg-type]
    assert [len(r.of("peer")) for r in rows] == [2, 2, 0] and FakeWork.closed == 4
    assert rows[1].of("peer")[0].bytes_moved == 64 * 256 // 2 + 20 * 4 * (64 + 256)
    assert all(r.ours is not None or "no measured win" in r.stock.detail or "faster" in r.stock.detail for r in rows)


# Random models


def test_random_models_run(installed_plugins) -> None:
    import mlx.core as mx

    shape = random_models.Shape("tiny", 128, 256, 2, 4, 2, 32, 320)
    for bits, group, _ in generate.FORMATS:
        model = random_models.mlx_model(shape, bits, group)
        assert mx.isfinite(model(mx.array([[1, 2, 3]]))).all().item()
        if bits == 2:
            codes = np.array(model.layers[0].mlp.up_proj.weight)
            assert not (codes & (codes >> 1) & 0x55555555).any()
            assert mx.array_equal(model.layers[0].mlp.up_proj.biases, -model.layers[0].mlp.up_proj.scales).item()
    assert len(shape.matrices()) == 1 + 7 * 2 and ("blk.1.ffn_down", 128, 256) in shape.matrices()


# The real peer


@pytest.fixture(scope="module")
def ggml():
    made = peer.Ggml(Path(BUILD), 2)
    yield made
    made.close()


@needs_peer
def test_threads_rest_after_a_graph(ggml) -> None:
    """They would spin for tenths of a second, on processors that others are measured on."""
    weights = np.zeros((64, 64), np.float32).tobytes()
    work = peer_work.MulMat(ggml, "f32", "plain", 64, 64, 1, 1, 1, weights, np.zeros((1, 64)))
    try:
        for _ in range(3):
            work.run()
            time.sleep(0.02)  # OpenMP's own threads spin for some milliseconds
            begin = time.process_time()
            time.sleep(0.05)
            assert time.process_time() - begin < 0.02
    finally:
        work.close()


@needs_peer
@pytest.mark.parametrize(
    ("kind", "error"), [("f32", 1e-5), ("f16", 2e-2), ("bf16", 2e-2), ("q8_0", 3e-2), ("q4_K", 0.4)]
)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_are_right_in_every_layout(ggml, kind, error, rows) -> None:
    rng = np.random.default_rng(0)
    n, k = 96, 512
    w, x = (rng.standard_normal(s, dtype=np.float32) for s in ((n, k), (rows, k)))
    for layout in peer_work.layouts_for(ggml, kind, n, k, rows):
        work = peer_work.MulMat(ggml, kind, layout, n, k, rows, 4, 2, ggml.quantized(kind, w), x)
        assert work.run() > 0 and work.run() > 0
        for graph in range(2):
            y = work.work.value(graph, 1).reshape(rows, n)
            assert np.abs(y - x @ w.T).max() <= error * np.sqrt(k), (layout, graph)
        work.close()


@needs_peer
@pytest.mark.parametrize("length", [1, 5])
def test_both_forms_of_attention_agree_with_float64(ggml, length) -> None:
    item = attention.Work(attention.Heads(4, 2, 64), length, 300)
    options = attention.AttentionOptions(weights_bytes=1 << 16)
    results = []
    for fused in (True, False):
        work = attention._peer(ggml, item, options, fused)
        work.run()
        y = work.value()
        results.append(y.reshape(length, 4, 64) if fused else y.reshape(4, length, 64).transpose(1, 0, 2))
        work.close()
    rng = np.random.default_rng(0)
    q = rng.standard_normal((length, 4, 64), dtype=np.float32).astype(np.float64)
    values = rng.standard_normal((512, 2, 64), dtype=np.float32).astype(np.float16).astype(np.float64)
    for i in range(length):
        kv = np.repeat(values[: 301 + i], 2, axis=1)
        scores = np.einsum("hd,shd->hs", q[i], kv) / 8
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        want = np.einsum("hs,shd->hd", weights / weights.sum(axis=1, keepdims=True), kv)
        for y in results:
            assert np.abs(y[i] - want).max() < 2e-2


@needs_peer
def test_ops_of_the_peer_are_right(ggml) -> None:
    x = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    work = ops._peer(ggml, ops.Work("rms_norm", 3, 64))
    work.run()
    assert np.allclose(work.value().reshape(3, 64), x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5), atol=1e-5)
    work.close()
    work = ops._peer(ggml, ops.Work("swiglu", 3, 64))
    work.run()
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, 64), dtype=np.float32) for _ in range(2))
    assert np.allclose(work.value().reshape(3, 64), a / (1 + np.exp(-a)) * b, atol=1e-4)
    work.close()
    work = ops._peer(ggml, ops.Work("rope", 2, 32, 2))
    work.run()
    x = np.random.default_rng(0).standard_normal((2, 2, 32), dtype=np.float32)
    angle = (ops.OFFSET + np.arange(2))[:, None, None] * 1e6 ** (-np.arange(16) / 16)
    want = np.concatenate([x[..., :16] * np.cos(angle) - x[..., 16:] * np.sin(angle),
                           x[..., 16:] * np.cos(angle) + x[..., :16] * np.sin(angle)], -1)  # fmt: skip
    assert np.allclose(work.value().reshape(2, 2, 32), want, atol=2e-3)
    work.close()


@needs_peer
def test_linear_command_with_the_real_peer(tmp_path, installed_plugins) -> None:
    out = tmp_path / "out.json"
    result = CliRunner().invoke(main, ["bench", "linear", "--peers", BUILD, "--shape", "128x512", "-m", "1,3", "--bits",
                                       "1,2,4", "--weights-mb", "1", "--repeats", "2", "--json", str(out)])  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert BUILD not in out.read_text() and data["versions"]["peer"].startswith("ggml ")
    assert [[s["name"] for s in r["series"] if s["role"] == "peer"] for r in data["rows"]] == [
        ["q1_0"], ["q1_0"], ["tq2_0"], ["tq2_0"], ["q4_K", "q4_0"], ["q4_K", "q4_0"],
    ]  # fmt: skip


@needs_peer
def test_random_gguf_is_read_by_llama_bench(ggml, tmp_path) -> None:
    pytest.importorskip("gguf")
    shape = random_models.Shape("tiny", 256, 512, 2, 4, 2, 64, 320)
    path = random_models.gguf_file(shape, "q4_K", ggml)
    stamp = path.stat().st_mtime_ns
    assert random_models.gguf_file(shape, "q4_K", ggml).stat().st_mtime_ns == stamp  # made once
    assert len(llama_bench.run(Path(BUILD), path, 1, tokens=2, repeats=2)) == 2
