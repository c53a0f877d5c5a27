"""The benchmark harness: arithmetic of rows, exact bytes, commands, files."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from backend_core import cpu_kernel, native
from backend_core.bench import floors, layers, linear, measure, output, plot, presets
from backend_core.cli import main
from backend_core.errors import AccelError

TINY = ("--weights-mb", "1", "--repeats", "2")


@pytest.fixture(autouse=True)
def small_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(floors, "_FMA_S", 1e-4)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *(str(a) for a in arguments)], catch_exceptions=False)


# Arithmetic


def test_bytes_are_counted_exactly() -> None:
    spec = layers.LinearSpec(4096, 4096, 2, 128)
    assert spec.weight_bytes() == 4096 * 4096 // 4 + 2 * 2 * 4096 * 32 == 4718592
    assert spec.weight_bytes(read_biases=False) == 4718592 - 2 * 4096 * 32
    assert spec.call_bytes(3, "float32", "float32") == 4718592 + 3 * 4 * 8192
    assert layers.LinearSpec(48, 96, dtype="bfloat16").call_bytes(2, "float16", "float16") == 2 * 48 * 96 + 2 * 2 * 144


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4, 5, 6, 8])
def test_bytes_are_those_of_the_arrays(bits) -> None:
    spec = layers.LinearSpec(24, 128, bits, 64 if bits else 0, "float16")
    layer = spec.layer(spec.arrays())
    assert sum(a.nbytes for a in layer.parameters().values()) == spec.weight_bytes()


@pytest.mark.parametrize(("bits", "ratio"), [(1, 0.5), (2, 1.0), (4, 8.0)])
def test_symmetric_biases_are_exact_and_weights_never_zero(bits, ratio) -> None:
    import mlx.core as mx

    spec = layers.LinearSpec(16, 256, bits, 64, "float16", sym=True)
    layer = spec.layer(spec.arrays())
    assert mx.array_equal(layer.biases, -layer.scales * ratio).item()
    assert not (np.array(layer.weight) == 0).all(axis=1).any() and (np.array(layer.scales) > 0).all()


def test_floor_is_the_longer_limit() -> None:
    row = measure.Row("w", 1, macs=1000, read=[1e9, 2e9, 3e9], fma=[1e6])
    assert row.floor(2_000_000) == (pytest.approx(1e-3), "bytes") or row.floor(2_000_000)[1] == "FMA"
    assert row.floor(4_000_000) == (pytest.approx(2e-3), "bytes")
    assert row.floor(1000) == (pytest.approx(1e-3), "FMA")
    assert measure.Row("w", 1).floor(10) == (0.0, "")


def test_ratios_come_from_medians() -> None:
    ours = measure.Series("ours", "ours", bytes_moved=100, samples=[1.0, 9.0, 2.0])
    peer = measure.Series("q4_K", "peer", samples=[5.0, 3.0, 4.0])
    row = measure.Row("w", 1, series=[ours, peer], read=[100.0], fma=[])
    assert row.ratio(peer) == 2.0 and row.of_floor() == 0.5 and ours.gbps == 50e-9
    assert row.as_dict()["ratios"] == {"q4_K": 2.0} and row.as_dict()["bound_by"] == "bytes"


@pytest.mark.parametrize("long", [True, False])
def test_rounds_turn_around_and_stop_sampling_slow_ones(long, monkeypatch) -> None:
    """The first sample after a pause counts only if it was long."""
    monkeypatch.setattr(measure, "LONG_S", -1.0 if long else 100.0)
    order: list[str] = []

    def sample(name: str):
        return lambda: order.append(name) or 1.0

    names = ("ours", "stock", "peer")
    contenders = [measure.Contender(measure.Series(n, n), sample(n), 2 if n == "stock" else 99) for n in names]
    row = measure.Row("w", 1)
    measure.rounds(contenders, 3, lambda: (7.0, 8.0), row, settle=0.0)
    once = ["ours", "stock", "peer", "peer", "stock", "ours", "ours", "peer"]
    assert order == (once if long else [name for name in once for _ in range(2)])
    assert [len(c.series.samples) for c in contenders] == [3, 2, 3]
    assert row.read == [7.0] * 3 and row.fma == [8.0] * 3


# Limits of the machine


@pytest.mark.parametrize("isa", ["portable", "avx2", ""])
def test_floor_kernels_compute_what_they_say(isa) -> None:
    code = """
import numpy as np, mlx.core as mx
from backend_core import cpu_kernel, native
library = native.get().__file__
read, fma = (cpu_kernel(library, f"accel_floor_{n}") for n in ("read", "fma"))
rng = np.random.default_rng(1)
for size in (0, 1, 7, 8, 9, 1 << 15, (1 << 15) + 33, 3 * (1 << 15) + 8):
    a = rng.integers(0, 1 << 63, size, dtype=np.uint64)
    for way in ((0, 1, 64), (4096, 1, 1 << 18), (0, 4, 1 << 18), (512, 8, 1 << 16), (0, 5, 960)):
        [out] = read(inputs=[mx.array(a)], output_shapes=[(1,)], output_dtypes=[mx.uint64], params=way)
        assert int(out.item()) == int(a[: size // 8 * 8].sum(dtype=np.uint64)), (size, way)
for rounds in (0, 1, 1000):
    [out] = fma(inputs=[mx.zeros(1)], output_shapes=[(5,)], output_dtypes=[mx.float32], params=[rounds])
    assert out.tolist() == [float(rounds)] * 5
"""
    if isa == "avx2" and "avx2" not in native.status().isa_names:
        pytest.skip("no AVX2")
    env = {**os.environ, **({"MLX_ACCEL_ISA": isa} if isa else {})}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_floor_kernels_refuse_what_they_do_not_take() -> None:
    import mlx.core as mx

    kernel = cpu_kernel(native.get().__file__, "accel_floor_read")
    for shape, params in (((2,), [0, 1, 64]), ((1,), [0, 1]), ((1,), [0, 0, 64]), ((1,), [0, 1, 65])):
        mx.eval(kernel(inputs=[mx.zeros(4)], output_shapes=[shape], output_dtypes=[mx.uint64], params=params))
        assert "floor_read takes" in native.take_errors()[0]
    kernel = cpu_kernel(native.get().__file__, "accel_floor_fma")
    mx.eval(kernel(inputs=[mx.zeros(4)], output_shapes=[(2,)], output_dtypes=[mx.float32], params=[-1]))
    assert "floor_fma takes" in native.take_errors()[0]


def test_floors_give_two_positive_rates() -> None:
    read, fma = floors.Floors()()
    assert read > 1e8 and fma > 1e7


# Commands


def check_schema(data: dict, bench: str) -> None:
    assert data["format"] == output.FORMAT and data["bench"] == bench
    assert data["command"].startswith("mlx-accel") and data["date"]
    assert {"cpu", "cpus", "threads", "isa", "last_level_cache_bytes"} <= set(data["machine"])
    assert data["versions"]["mlx"] and data["versions"]["mlx-accel"]
    assert data["limits"]["read_bytes_per_s"] > 0 and data["rows"]
    for row in data["rows"]:
        assert {"work", "rows", "facts", "multiply_adds", "series"} <= set(row)
        for series in row["series"]:
            assert series["samples_s"] and series["median_s"] > 0
            assert series["role"] in ("ours", "stock", "peer")


def test_linear_writes_every_file(tmp_path, installed_plugins) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "markdown", "plot")}
    if not plot.available():
        del files["plot"]
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    result = call("linear", "--shape", "64x256", "--bits", "2,4", "--dense", "float16", "-m", "1,3", *TINY, *options)
    assert result.exit_code == 0, result.output
    data = json.loads(files["json"].read_text())
    check_schema(data, "linear")
    assert [(r["facts"]["bits"], r["rows"]) for r in data["rows"]] == [(b, m) for b in (2, 4, 0) for m in (1, 3)]
    first = data["rows"][0]
    spec = layers.LinearSpec(64, 256, 2, 128)
    assert {s["bytes"] for s in first["series"]} == {spec.call_bytes(1, "float32", "float32")}
    assert first["multiply_adds"] == 64 * 256
    lines = list(csv.DictReader(files["csv"].open()))
    assert {r["variant"] for r in lines} >= {"stock"} and all(float(r["us"]) > 0 for r in lines)
    text = files["markdown"].read_text()
    assert text.count("64x256") >= 6 and "- command: `mlx-accel" in text and "- machine: " in text
    if "plot" in files:
        assert files["plot"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_attention_and_ops_run(tmp_path, installed_plugins) -> None:
    out = tmp_path / "out.json"
    result = call("attention", "--heads", "4/2x32", "--depth", "40", "--length", "1,3,20", "--only", "L=", *TINY,
                  "--json", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    check_schema(data, "attention")
    row = data["rows"][1]
    # 3 queries see 41, 42 and 43 keys; keys and values in float16, queries and result in float32.
    assert row["multiply_adds"] == 2 * (41 + 42 + 43) * 4 * 32
    moved = 2 * 43 * 2 * 32 * 2 + 2 * 3 * 4 * 32 * 4
    assert [s["bytes"] for s in row["series"] if s["role"] == "ours"] in ([moved], [])
    result = call("ops", "--only", "rms_norm 576", "--only", "rope 9.*M=1", "--only", "swiglu 1536 M=1$",
                  "--repeats", 2, "--json", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    check_schema(data, "ops")
    assert {r["facts"]["op"] for r in data["rows"]} == {"rms_norm", "rope", "swiglu"}


def test_preset_writes_csv(tmp_path, monkeypatch, installed_plugins) -> None:
    monkeypatch.setattr(presets, "SHAPES", {"Toy": {"q_proj": (64, 256), "o_proj": (64, 256), "k_proj": (32, 256)}})
    out = tmp_path / "out.csv"
    result = call("bonsai_decode_bench", "--csv", out, "-m", "1,5", "--group-size", "64", "--sym", "--only", "q_proj",
                  *TINY)  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = list(csv.DictReader(out.open()))
    assert {(r["bits"], r["rows"]) for r in lines} == {("1", "1"), ("1", "5"), ("2", "1"), ("2", "5")}
    assert {r["work"] for r in lines} == {"Toy q_proj/o_proj"} and {r["n"] for r in lines} == {"64"}


def test_preset_has_the_real_shapes() -> None:
    work = presets.bonsai_decode_bench()
    shapes = {(w.spec.n, w.spec.k) for _, w in work}
    assert {(10240, 5120), (12288, 5120), (5120, 17408), (248320, 5120), (12288, 4096), (4096, 12288)} <= shapes
    assert {w.rows for _, w in work} == {1, 2, 3, 4, 5} and {w.spec.bits for _, w in work} == {1, 2}
    assert len({(layer, w) for layer, w in work}) == len(work)
    with pytest.raises(AccelError, match="multiple of the group size"):
        presets.bonsai_decode_bench(group_sizes=(96,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linear", "--shape", "256", "--weights-mb", "1", "-m", "1"), None),
        (("linear", "--shape", "64x"), "is not a shape"),
        (("linear", "--shape", "0x64"), "is not a shape"),
        (("linear", "--bits", "7"), "7-bit weights"),
        (("linear", "--bits", "2", "--group-size", "48"), "groups of 48"),
        (("linear", "--bits", "4", "--shape", "64x96"), "not a multiple of the group size 64"),
        (("linear", "-m", "1,x"), "not a list of positive numbers"),
        (("linear", "-m", "0"), "not a list of positive numbers"),
        (("linear", "--bits", "²"), "not a list of positive numbers"),
        (("bonsai_decode_bench", "--bits", "9"), "9-bit weights"),
        (("linear", "--shape", "128", "--json", "/nowhere/at/all.json"), "is not a directory"),
        (("linear", "--peer-types", "q9_Z"), "'q9_Z' is none of"),
        (("linear", "--threads", "0"), "0 is not in the range"),
        (("linear", "--threads", "-1"), "-1 is not in the range"),
        (("linear", "--threads", "100000"), "is not in the range"),
        (("linear", "--repeats", "0"), "0 is not in the range"),
        (("linear", "--only", "("), "--only"),
        (("linear", "--only", "nothing has this name"), "nothing to measure"),
        (("attention", "--heads", "9/4x64"), "is not heads/KV heads x head_dim"),
        (("generate", "--model", "/nowhere", "--only", "decode"), "does not exist"),
        (("generate", "--random", "qwen9"), "qwen9"),
    ],
)
def test_mistakes_get_one_message(arguments, message, monkeypatch) -> None:
    monkeypatch.setattr(linear, "_measure", lambda *a: measure.Row("w", 1))
    result = call(*arguments)
    if message is None:  # one number is a square shape
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    assert message in " ".join(result.stderr.replace("│", "").split()), result.stderr


def test_threads_are_set_for_the_run_only(installed_plugins, tmp_path) -> None:
    before = native.get().threads()
    out = tmp_path / "out.json"
    result = call("linear", "--shape", "64x256", "--bits", "4", "-m", "1", "--threads", 3, "--no-stock", *TINY,
                  "--json", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["machine"]["threads"] == 3
    assert native.get().threads() == before and "MLX_ACCEL_THREADS" not in os.environ


def test_files_that_cannot_be_written_are_an_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(linear, "_measure", lambda *a: measure.Row("w", 1))
    result = call("linear", "--shape", "64x256", "--bits", "4", "-m", "1", *TINY, "--json", tmp_path / "no" / "x.json")
    assert result.exit_code == 2 and "cannot be written" in result.stderr


def test_commands_are_repeatable_elsewhere() -> None:
    words = ["bench", "linear", "--peers", "/tmp/x", "--json", "/tmp/y/out.json", "--only", "a b"]
    assert output.command_line(words) == "mlx-accel bench linear --peers DIR --json out.json --only 'a b'"
    assert output.command_line(["--peers=/tmp/x"]) == "mlx-accel --peers=DIR"


# Pictures


def example(bench: str) -> dict:
    rows = []
    for m in (1, 4):
        row = measure.Row("2-bit g128 64x64", m, 4096 * m, read=[1e10], fma=[1e11])
        row.facts = {"unit": "token"} if bench == "generate" else {}
        for role, seconds in (("ours", 2e-6), ("stock", 9e-4), ("peer", 3e-6), ("peer", 4e-6)):
            row.series.append(measure.Series(role, role, bytes_moved=10000, samples=[seconds, 1.1 * seconds]))
        rows.append(row)
    return output.result(bench, rows, {})


@pytest.mark.parametrize("bench", ["linear", "generate"])
def test_plot_is_a_png_of_some_size(bench, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(example(bench), tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data[:4] == b"\x89PNG" and int.from_bytes(data[16:20], "big") >= 1000


def test_missing_matplotlib_is_said(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    with pytest.raises(AccelError, match="matplotlib is not installed"):
        plot.draw(example("linear"), tmp_path / "a.png")
    output.write(example("linear"), [], json_file=tmp_path / "a.json")
    assert "pip install matplotlib" in capsys.readouterr().err and not (tmp_path / "a.png").exists()
    result = call("linear", "--shape", "64x256", "--bits", "4", "-m", "1", *TINY, "--plot", tmp_path / "a.png")
    assert result.exit_code == 2 and "matplotlib is not installed" in result.stderr
    assert Path(tmp_path / "a.json").is_file()
