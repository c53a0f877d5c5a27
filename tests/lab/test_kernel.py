"""lab.metal_kernel: the signature mlx writes, layouts, counters, contracts, messages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend_core.testing import lab
from backend_core.testing.lab.signature import ATTRIBUTES

pytestmark = pytest.mark.lab

QMV = Path(__file__).with_name("one_bit.metal").read_text()


def generated_by_mlx(tmp_path: Path, arguments: dict[str, Any], inputs: str, call: str) -> str:
    """What mlx writes for the kernel: it prints it while it exports a function, without a Metal device."""
    script = f"""
import mlx.core as mx
k = mx.fast.metal_kernel(**{arguments!r})
def f(x):
    return k(inputs={inputs}, grid=(1, 1, 1), threadgroup=(1, 1, 1), verbose=True, {call})
mx.export_function({str(tmp_path / "f.mlxfn")!r}, f, mx.zeros((100,), mx.float16))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    match = re.search(r"```\n(.*)```", done.stdout, re.S)
    assert match
    return match.group(1)


def squeezed(text: str) -> str:
    """Without white space."""
    return re.sub(r"\s+", "", text)


CASES = {
    "all": (
        {
            "input_names": ["a", "b", "c", "d"], "output_names": ["o", "p"], "header": "inline int h() { return 1; }\n",
            "source": "o[0] = a[0] + b_strides[0] + b_shape[0] + d_ndim + c; " + " ".join(f"{n};" for n in ATTRIBUTES),
        },
        "[x, mx.zeros((7,), mx.int8), mx.array(1), mx.zeros((2, 4), mx.uint64)]",
        "template=[('T', mx.bfloat16), ('N', 4), ('B', True)], output_shapes=[(1,), (2,)], "
        "output_dtypes=[mx.float32, mx.bool_]",
    ),
    "negative": (
        {"input_names": ["a"], "output_names": ["o"], "source": "o[0] = N;"},
        "[x]",
        "template=[('N', -4)], output_shapes=[(1,)], output_dtypes=[mx.uint32]",
    ),
    "atomic": (
        {
            "input_names": ["a"], "output_names": ["o"], "atomic_outputs": True,
            "source": "atomic_fetch_add_explicit(o, a[thread_position_in_grid.x], memory_order_relaxed);",
        },
        "[x]",
        "output_shapes=[(1,)], output_dtypes=[mx.uint32]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_signature_is_that_of_mlx(tmp_path: Path, case: str) -> None:
    arguments, inputs, call = CASES[case]
    arguments = {"name": "kernel", **arguments}
    theirs = generated_by_mlx(tmp_path, arguments, inputs, call)
    kernel = lab.metal_kernel(**arguments)
    facts = {
        "a": lab.InputFacts("a", lab.float16, 100, 1), "b": lab.InputFacts("b", lab.int8, 7, 1),
        "c": lab.InputFacts("c", lab.int32, 1, 0), "d": lab.InputFacts("d", lab.uint64, 8, 2),
    }  # fmt: skip
    inputs_given = [facts[n] for n in arguments["input_names"]]
    if case == "all":
        mine = kernel.generated(inputs_given, ["float32", "bool_"], [("T", lab.bfloat16), ("N", 4), ("B", True)])
    else:
        mine = kernel.generated(inputs_given, ["uint32"], [("N", -4)] if case == "negative" else [])
    assert squeezed(mine.header + mine.before + arguments["source"] + mine.after) == squeezed(theirs)


def one_bit(rows: int, k: int, dtype: Any) -> tuple[lab.Result, np.ndarray[Any, Any], dict[str, Any]]:
    """A 1-bit matrix times a vector in the lab, and in float64."""
    rng = np.random.default_rng(rows)
    w = rng.integers(0, 2**32, (rows, k // 32), dtype=np.uint32)
    s, b = (rng.standard_normal((rows, k // 128)).astype(np.float16) for _ in range(2))
    x = rng.standard_normal(k).astype(np.float32)
    given = {"float16": x.astype(np.float16), "float32": x, "bfloat16": lab.to_bfloat16(x)}[dtype.name]
    kernel = lab.metal_kernel("one_bit", ["w", "scales", "biases", "x"], ["y"], QMV)
    result = kernel(
        inputs=[w, s, b, given], template=[("T", dtype), ("K", k)], grid=(32, -(-rows // 4) * 4, 1),
        threadgroup=(32, 4, 1), output_shapes=[(rows,)], output_dtypes=[dtype],
    )  # fmt: skip
    bits = (w[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).reshape(rows, k)
    weights = bits * np.repeat(s.astype(np.float64), 128, 1) + np.repeat(b.astype(np.float64), 128, 1)
    return result, weights @ lab.to_float32(given).astype(np.float64), {"w": w, "x": given}


@pytest.mark.parametrize("dtype", [lab.float16, lab.float32, lab.bfloat16])
def test_one_bit_matrix_vector(dtype: lab.LabDtype) -> None:
    result, want, _ = one_bit(64, 4096, dtype)
    got = lab.to_float32(result.check().outputs[0]).astype(np.float64)
    ulp = {"float16": 2.0**-10, "float32": 2.0**-20, "bfloat16": 2.0**-7}[dtype.name]
    assert (abs(got - want) <= ulp * abs(want) + 1e-3).all()


def test_it_takes_less_than_two_seconds_once_compiled() -> None:
    one_bit(64, 4096, lab.float16)
    assert one_bit(64, 4096, lab.float16)[0].report.seconds < 2


def test_counters() -> None:
    report = one_bit(64, 4096, lab.float16)[0].report
    w, s, x, y = (report.buffers[n] for n in ("w", "scales", "x", "y"))
    # Each weight byte once, 32 lanes x 4 bytes are one line.
    assert w.bytes_read == w.unique_read == w.nbytes == 64 * 4096 // 8
    assert w.read_transactions == w.nbytes // 128
    # A group's scale is asked for by four lanes, whose requests are one transaction of the SIMD group.
    assert (s.bytes_read, s.unique_read, s.read_transactions) == (4 * s.nbytes, s.nbytes, 64 * 4)
    # Every row reads all of x.
    assert (x.bytes_read, x.unique_read) == (64 * x.nbytes, x.nbytes)
    assert (y.bytes_written, y.unique_written, y.write_transactions, y.bytes_read) == (128, 128, 64, 0)
    assert report.threads == 64 * 32 and report.threadgroup_bytes == 0


def test_transactions_by_stride() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        float v = 0;
        for (int k = 0; k < 2; k++) v += a[(i * STRIDE + k) % 4096];
        o[i] = v;
    """
    kernel = lab.metal_kernel("strided", ["a"], ["o"], source)

    def lines(stride: int, dtype: Any = np.float32) -> int:
        result = kernel(
            inputs=[np.zeros(4096, dtype)], template=[("STRIDE", stride)], grid=(64, 1, 1), threadgroup=(64, 1, 1),
            output_shapes=[(64,)], output_dtypes=[np.float32],
        )  # fmt: skip
        return result.check().report.buffers["a"].read_transactions

    # Two loads by two SIMD groups. The second load of a dense row reaches one element into the next line.
    assert lines(0) == 4
    assert lines(1) == 2 * (1 + 2)
    assert lines(2) == 4 * 2
    assert lines(32) == 4 * 32
    assert lines(64) == 4 * 32


def test_vector_loads_count_as_one_access() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        float4 v = ((const device float4*)a)[i];
        o[i] = v.x + v.y + v.z + v.w;
    """
    kernel = lab.metal_kernel("wide", ["a"], ["o"], source)
    a = np.arange(128, dtype=np.float32)
    result = kernel(
        inputs=[a], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(32,)], output_dtypes=["float32"]
    ).check()
    assert (result.outputs[0] == a.reshape(32, 4).sum(1)).all()
    assert result.report.buffers["a"].read_transactions == 4
    assert result.report.buffers["a"].bytes_read == 512


def test_shapes_strides_and_elem_to_loc() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        uint at = elem_to_loc(i, a_shape, a_strides, a_ndim);
        o[i] = a[at] + 1000 * a_shape[0] + 100000 * a_ndim;
    """
    a = np.arange(24, dtype=np.int32).reshape(4, 6).T
    for contiguous in (True, False):
        kernel = lab.metal_kernel("strides", ["a"], ["o"], source, ensure_row_contiguous=contiguous)
        result = kernel(
            inputs=[a], grid=(24, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(6, 4)], output_dtypes=[lab.int32]
        ).check()
        assert (result.outputs[0] == a + 206000).all()


def test_scalars_small_inputs_init_value_and_atomic_outputs() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        atomic_fetch_add_explicit(o + i % 4, a + b[i % 3], memory_order_relaxed);
    """
    kernel = lab.metal_kernel("adds", ["a", "b"], ["o"], source, atomic_outputs=True)
    result = kernel(
        inputs=[2.5, np.float32([0, 1, 2])], grid=(12, 1, 1), threadgroup=(12, 1, 1), output_shapes=[(4,)],
        output_dtypes=[lab.float32], init_value=100,
    ).check()  # fmt: skip
    assert (result.outputs[0] == 100 + 3 * 2.5 + 3).all()


def test_a_grid_smaller_than_the_threadgroup() -> None:
    source = "o[thread_position_in_grid.x] = threads_per_threadgroup.x + simd_sum(1.0f);"
    kernel = lab.metal_kernel("small", ["a"], ["o"], source)
    result = kernel(
        inputs=[0], grid=(5, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(5,)], output_dtypes=[lab.float32]
    ).check()
    assert (result.outputs[0] == 5 + 5).all()


def test_a_slice_lies_where_it_lies_in_its_array() -> None:
    source = "uint i = thread_position_in_grid.x; o[i] = ((const device half4*)a)[i].y;"
    kernel = lab.metal_kernel("slices", ["a"], ["o"], source)
    whole = np.arange(69, dtype=np.float16)

    def run(a: np.ndarray[Any, Any]) -> lab.Result:
        return kernel(
            inputs=[a], grid=(16, 1, 1), threadgroup=(16, 1, 1), output_shapes=[(16,)], output_dtypes=[lab.float16]
        )

    for start in (0, 4):
        assert (run(whole[start : start + 64]).check().outputs[0] == start + 1 + 4 * np.arange(16)).all()
    (fault,) = run(whole[5:]).report.faults
    assert fault.kind == "misaligned" and "the buffer itself starts at none" in fault.message
    run(whole[5:].copy()).check()
    run(np.stack([whole[:64]] * 2, 1)[:, 1]).check()  # not contiguous: mlx copies it
    # 64 elements of 2 bytes are one line, or two if they start within one.
    copy = lab.metal_kernel("copy", ["a"], ["o"], "o[thread_position_in_grid.x] = a[thread_position_in_grid.x];")
    for start, lines in ((0, 2), (5, 3)):
        report = copy(
            inputs=[whole[start : start + 64]], grid=(64, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(64,)],
            output_dtypes=[lab.float16],
        ).report  # fmt: skip
        assert report.buffers["a"].read_transactions == lines


def test_arrays_of_the_other_byte_order() -> None:
    kernel = lab.metal_kernel("copy", ["a"], ["o"], "o[thread_position_in_grid.x] = a[thread_position_in_grid.x];")
    result = kernel(
        inputs=[np.arange(8, dtype=">f4")], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)],
        output_dtypes=[lab.float32],
    ).check()  # fmt: skip
    assert (result.outputs[0] == np.arange(8)).all()


def test_limits_of_a_launch() -> None:
    kernel = lab.metal_kernel("one", ["a"], ["o"], "o[thread_position_in_grid.x] = 1;")
    report = kernel(
        inputs=[0], grid=(8, 1, 1), threadgroup=(1025, 1, 1), output_shapes=[(8,)], output_dtypes=[lab.float32]
    ).report
    assert report.kinds() == {"threads"}  # mlx refuses it though the grid is smaller
    for count, kinds in ((30, set()), (31, {"buffers"})):
        names = [f"a{i}" for i in range(count)]
        many = lab.metal_kernel("many", names, ["o"], "o[thread_position_in_grid.x] = a0;")
        report = many(
            inputs=[1.0] * count, grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)],
            output_dtypes=[lab.float32],
        ).report  # fmt: skip
        assert report.kinds() == kinds


def test_unsigned_indices_that_wrap_show_in_what_was_touched() -> None:
    columns, rows = 4096, 2**20 + 3

    def touched(kind: str) -> tuple[int, int]:
        source = f"uint i = thread_position_in_grid.x; o[i] = w[{kind}(r) * {columns} + i];"
        kernel = lab.metal_kernel(f"touched_{kind}", ["w", "r"], ["o"], source)
        result = kernel(
            inputs=[lab.sparse((rows, columns), lab.uint8), rows - 1], grid=(32, 1, 1), threadgroup=(32, 1, 1),
            output_shapes=[(32,)], output_dtypes=[lab.uint8],
        ).check()  # fmt: skip
        return result.report.buffers["w"].touched

    last = (rows - 1) * columns
    assert touched("ulong") == (last, last + 32)
    assert touched("uint") == (last % 2**32, last % 2**32 + 32)


@pytest.mark.parametrize(
    "body", ["o[i] = 1; while (o[i] > 0) o[i] = 1;", "uint k = i | 1; while (k) k = k * 3 + 2 * (k & 1); o[i] = k;"]
)
def test_ctrl_c_ends_a_launch(body: str) -> None:
    kernel = lab.metal_kernel("endless", ["a"], ["o"], "uint i = thread_position_in_grid.x; " + body)

    def run(timeout: float) -> lab.Result:
        return kernel(
            inputs=[0], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)], output_dtypes=[lab.float32],
            timeout=timeout,
        )  # fmt: skip

    assert run(0.05).report.kinds() >= {"timeout"}  # compiles
    handler = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    with pytest.raises((KeyboardInterrupt, lab.LabError)):
        timer.start()
        run(30)
    assert time.monotonic() - start < 10
    assert signal.getsignal(signal.SIGINT) is handler


def test_locals_that_were_never_written_show_in_the_result() -> None:
    kernel = lab.metal_kernel("sums", ["a"], ["o"], "float s[2]; s[0] += a[0]; o[0] = s[0];")
    result = kernel(
        inputs=[np.ones(8, np.float32)], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
        output_dtypes=[lab.float32],
    )  # fmt: skip
    assert not abs(result.outputs[0][0]) < 1e30


def test_index_arithmetic_beyond_32_bits() -> None:
    """A matrix of 3 GB of which one row is touched: a row offset in int overflows, in size_t it does not."""
    rows, columns = 3 * 2**20 + 5, 1024
    w = lab.sparse((rows, columns), lab.int8)

    def last_row(kind: str) -> lab.Result:
        source = f"""
            uint row = threadgroup_position_in_grid.y;
            {kind} at = {kind}(row) * K + thread_position_in_threadgroup.x;
            int sum = simd_sum(int(w[at]));
            if (thread_index_in_simdgroup == 0) o[row] = sum;
        """
        kernel = lab.metal_kernel(f"far_{kind}", ["w"], ["o"], source)
        return kernel(
            inputs=[w], template=[("K", columns)], grid=(32, rows, 1), threadgroup=(32, 1, 1),
            output_shapes=[(rows,)], output_dtypes=[lab.int32], groups=[(0, rows - 1, 0)],
        )  # fmt: skip

    assert {"signed-overflow", "out-of-bounds-read"} <= last_row("int").report.kinds()
    good = last_row("size_t").check()
    assert good.report.buffers["w"].unique_read == 32 and good.outputs[0][rows - 1] == 0


def test_a_contract_is_checked_before_launch() -> None:
    kernel = lab.metal_kernel("one_bit", ["w", "scales", "biases", "x"], ["y"], "syntax error, never compiled")
    w, s, x = np.zeros((8, 4), np.uint32), np.zeros((8, 1), np.float16), np.zeros(128, np.float16)
    with pytest.raises(lab.LabError) as e:
        kernel(
            inputs=[w, s, s, x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(8,)],
            output_dtypes=[lab.float16], contract={"w": (8, 8), "scales": ((8, 1), lab.float32), "x": (128,)},
        )  # fmt: skip
    message = str(e.value)
    assert "w: (8, 4) uint32, the contract wants (8, 8) uint32" in message
    assert "scales: (8, 1) float16, the contract wants (8, 1) float32" in message
    assert "x:" not in message


def copy_of_eight() -> tuple[Any, dict[str, Any]]:
    """A kernel that copies, and what it is called with."""
    call: dict[str, Any] = {
        "inputs": [np.zeros(8, np.float32)], "grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)],
        "output_dtypes": [lab.float32],
    }  # fmt: skip
    copy = "o[thread_position_in_grid.x] = a[thread_position_in_grid.x];"
    return lab.metal_kernel("copy", ["a"], ["o"], copy), call


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ({"o": (4,)}, r"do not fit .*\no: \(8,\) float32, the contract wants \(4,\) float32"),
        ({"o": ((8,), lab.float16)}, r"o: \(8,\) float32, the contract wants \(8,\) float16"),
        ({"b": (8,)}, r"names 'b', which is no input or output; there are \['a', 'o'\]"),
        ({"a": 8}, r"copy: the contract of 'a' is a shape or \(shape, dtype\), not 8"),
        ({"a": (8, lab.float32)}, r"the contract of 'a' is a shape or"),
        ({"a": ((8,), "no dtype")}, r"the contract of 'a' is a shape or"),
    ],
)
def test_contracts_of_outputs_and_bad_contracts(contract: dict[str, Any], message: str) -> None:
    kernel, call = copy_of_eight()
    with pytest.raises(lab.LabError, match=message):
        kernel(contract=contract, **call)
    kernel(contract={"a": [8], "o": ((np.int64(8),), "float32")}, **call).check()


def test_outputs_that_are_not_bound_are_refused() -> None:
    text = "kernel void f(device float* o, device float* p [[buffer(3)]]) { o[0] = p[0] = 1; }"
    one = np.zeros(1, np.float32)
    with pytest.raises(lab.LabError, match=r"outputs names \[\[buffer\(5\)\]\], which is not bound; \[0, 3\] are"):
        lab.run_msl(text, "f", {0: one, 3: one}, (1, 1, 1), (1, 1, 1), outputs=[0, 5])
    lab.run_msl(text, "f", {0: one, 3: one}, (1, 1, 1), (1, 1, 1), outputs=[0, 3]).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": []}, "takes 1 inputs"),
        ({"inputs": [np.zeros((0, 3))]}, "float64"),
        ({"output_shapes": []}, "1 outputs"),
        ({"grid": (0, 1, 1)}, "grid takes three numbers"),
        ({"threadgroup": (1, 1)}, "threadgroup takes three numbers"),
        ({"template": [("T", 1.5)]}, "template parameter 'T'"),
        ({"template": [("N", 2**31)]}, "template parameter 'N': 2147483648 does not fit"),
        ({"inputs": [2**31]}, "input 'a': 2147483648 does not fit into int32"),
        ({"output_shapes": [(-8,)]}, r"output 'o' of shape \(-8,\)"),
        ({"output_dtypes": ["float64"]}, "output 'o' .*'float64' is no element type"),
        ({"grid": (2**32, 1, 1)}, "grid takes three numbers of at least 1 and below 2"),
        ({"grid": (8.5, 1, 1)}, "grid takes three numbers"),
        ({"groups": [(1, 0, 0)]}, r"no threadgroup \(1, 0, 0\)"),
    ],
)
def test_bad_launches_are_refused(change: dict[str, Any], message: str) -> None:
    kernel, call = copy_of_eight()
    with pytest.raises(lab.LabError, match=message):
        kernel(**{**call, **change})


def test_buffers_of_no_bytes_are_bound_and_any_access_to_them_is_outside() -> None:
    kernel = lab.metal_kernel("none", ["a", "b"], ["o", "p"], """
        uint i = thread_position_in_grid.x;
        if (i < uint(a_shape[0])) p[i] = a[i];
        o[i] = b[i];
    """)  # fmt: skip
    call: dict[str, Any] = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_dtypes": [lab.float32] * 2}
    none, some = np.zeros((0, 3), np.float32), np.arange(8, dtype=np.float32)
    result = kernel(inputs=[none, some], output_shapes=[(8,), (0,)], **call).check()
    assert (result.outputs[0] == some).all() and result.outputs[1].shape == (0,)
    assert result.report.buffers["a"].nbytes == result.report.buffers["a"].bytes_read == 0
    assert kernel(inputs=[none, none], output_shapes=[(8,), (0,)], **call).report.kinds() == {"out-of-bounds-read"}
    assert "out-of-bounds-write" in kernel(inputs=[none, some], output_shapes=[(0,), (0,)], **call).report.kinds()
    text = """kernel void f(device float* o, constant int& n, uint i [[thread_position_in_grid]]) {
        if (int(i) < n) o[i] = 1;
    }"""
    assert lab.run_msl(text, "f", {0: none, 1: 0}, (8, 1, 1), (8, 1, 1)).check().outputs[0].shape == (0, 3)
    assert lab.run_msl(text, "f", {0: none, 1: 1}, (8, 1, 1), (8, 1, 1)).report.kinds() == {"out-of-bounds-write"}


def test_a_compile_error_shows_the_kernels_line() -> None:
    kernel = lab.metal_kernel(
        "typo", ["a"], ["o"], "uint i = thread_position_in_grid.x;\no[i] = a[i] + gain;", header="constant int g = 1;\n"
    )
    with pytest.raises(lab.LabError) as e:
        kernel(
            inputs=[np.zeros(8, np.float32)], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)],
            output_dtypes=[lab.float32],
        )  # fmt: skip
    assert re.search(r"typo\.metal:2: error: .*'gain'.*\n    2 \| o\[i\] = a\[i\] \+ gain;", str(e.value))


def test_a_file_that_does_not_compile(tmp_path: Path) -> None:
    file = tmp_path / "broken.metal"
    file.write_text("kernel void f(device float* o [[buffer(0)]]) {\n    o[0] = 1\n}\n")
    with pytest.raises(lab.LabError, match=r"broken\.metal:2: error: expected ';'"):
        lab.run_msl(file, "f", {0: np.zeros(1, np.float32)}, (1, 1, 1), (1, 1, 1))
    file.write_text('#include "nowhere.h"\nkernel void f(device float* o) { o[0] = 1; }')
    with pytest.raises(lab.LabError, match=r"broken\.metal:1: error: .*nowhere\.h"):
        lab.run_msl(file, "f", {0: np.zeros(1, np.float32)}, (1, 1, 1), (1, 1, 1))
    with pytest.raises(lab.LabError, match="has: g"):
        lab.run_msl("kernel void g(device float* o) {}", "f", {0: np.zeros(1, np.float32)}, (1, 1, 1), (1, 1, 1))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from backend_core.testing.lab import compiler

    compiler._probe.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(lab.CompilerMissing, match=r"install g\+\+ or clang\+\+"):
        lab.find_compiler()
    compiler._probe.cache_clear()


def test_mlx_arrays_are_taken_as_they_are() -> None:
    kernel = lab.metal_kernel("twice", ["a"], ["o"], "uint i = thread_position_in_grid.x; o[i] = 2 * a[i];")
    result = kernel(
        inputs=[mx.arange(9).astype(mx.float16)], grid=(9, 1, 1), threadgroup=(9, 1, 1), output_shapes=[(9,)],
        output_dtypes=[mx.float16],
    ).check()  # fmt: skip
    assert (result.outputs[0] == 2 * np.arange(9)).all()
    result = kernel(
        inputs=[mx.arange(9).astype(mx.bfloat16)], grid=(9, 1, 1), threadgroup=(9, 1, 1), output_shapes=[(9,)],
        output_dtypes=[mx.bfloat16],
    ).check()  # fmt: skip
    assert (lab.to_float32(result.outputs[0]) == 2 * np.arange(9)).all()
