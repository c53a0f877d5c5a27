"""Every detector finds its planted fault, at its line, and leaves the near miss alone."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from backend_core.testing import lab

pytestmark = pytest.mark.lab

FILE = Path(__file__).with_name("faults.metal")
TEXT = FILE.read_text()
KERNELS = {m.group(1): m.start() for m in re.finditer(r"^kernel void (\w+)\([^;]*?\) \{", TEXT, re.M | re.S)}
BAD = [name for name in KERNELS if name.startswith("bad_")]
GOOD = [name for name in KERNELS if name.startswith("good_")]
#: Kernels that only two threadgroups bring to fault.
IN_GROUPS = {"bad_device_race_of_groups": 32, "bad_threadgroup_of_the_last_group": 32}
#: Faults that follow from another: reading before a barrier is a race and may be a read of nothing.
CONSEQUENCES = {
    "race": {"uninitialised-read", "race"},
    "race-same-value": {"race-same-value"},
    "out-of-bounds-write": {"race"},
    "crash": {"unwritten-output"},
    "simd-divergence": {"simd-divergence"},
    "uninitialised-read": {"uninitialised-read"},
    "barrier-divergence": set(),
}


def body(name: str) -> tuple[int, str]:
    """First line and text of a kernel."""
    start = KERNELS[name]
    following = [s for s in KERNELS.values() if s > start]
    return TEXT[:start].count("\n") + 1, TEXT[start : min(following, default=len(TEXT))]


def expected(name: str) -> tuple[str, int]:
    """Kind and line that a bad kernel's comment announces."""
    first, text = body(name)
    for i, line in enumerate(text.splitlines()):
        if match := re.search(r"// ([a-z-]+)$", line):
            return match.group(1), first + i
    raise AssertionError(f"{name} announces no fault")


def launch(name: str) -> lab.Result:
    text = body(name)[1]
    signature = text[: text.index("{")]
    values = {
        "a": np.arange(64, dtype=np.float32), "o": np.zeros(64, np.float32), "n": np.int32(2),
    }  # fmt: skip
    if "atomic_uint* n" in signature:
        values["n"] = np.zeros(1, np.uint32)
    names = re.findall(r"(?:device|constant)\b[^,\[]*?(\w+)(?=,)", signature)
    buffers = {i: values[n] for i, n in enumerate(names)}
    width = IN_GROUPS.get(name, 64)
    limit = 0.3 if name.startswith("bad_endless") else 30
    return lab.run_msl(
        FILE, name, buffers, (64, 1, 1), (width, 1, 1), outputs=[names.index("o")], timeout=limit
    )  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_planted_fault(name: str) -> None:
    kind, line = expected(name)
    report = launch(name).report
    found = [f for f in report.faults if f.kind == kind]
    assert found, f"{kind} not found; found: {report.kinds() or 'nothing'}"
    others = report.kinds() - {kind} - CONSEQUENCES.get(kind, set()) - {"unwritten-output"}
    assert not others, [str(f) for f in report.faults]
    if kind not in ("unwritten-output", "threadgroup-memory", "timeout", "crash"):
        places = [f.line for f in found] + [int(n) for f in found for n in re.findall(r"\.metal:(\d+)\)", f.message)]
        assert line in places, [str(f) for f in report.faults]
        assert found[0].file == str(FILE)
        assert found[0].lane is not None


@pytest.mark.parametrize("name", GOOD)
def test_near_miss(name: str) -> None:
    report = launch(name).report
    assert report.faults == (), [str(f) for f in report.faults]


def test_every_way_to_declare_a_variable_shares_it() -> None:
    assert (launch("good_declarations").outputs[0] == 6 * (63 - np.arange(64))).all()


def test_a_threadgroup_variable_with_a_value_is_refused() -> None:
    source = "kernel void f(device float* o) {\n    threadgroup float s = 1;\n    o[0] = s;\n}"
    with pytest.raises(lab.LabError, match=r"kernel\.metal:2: error: a threadgroup variable has no initial value"):
        lab.run_msl(source, "f", {0: np.zeros(1, np.float32)}, (1, 1, 1), (1, 1, 1))


def test_every_kind_is_planted() -> None:
    from backend_core.testing.lab import launch_abi

    planted = {expected(name)[0] for name in BAD}
    assert planted >= set(launch_abi.FAULT_KINDS)
    assert planted >= {"unwritten-output", "threadgroup-memory"}


def test_a_fault_names_buffer_index_and_lane() -> None:
    report = launch("bad_write_beyond").report
    (fault,) = report.faults
    assert (fault.kind, fault.buffer, fault.lane) == ("out-of-bounds-write", "o", (63, 0, 0))
    assert "element 64 of 'o' (64 elements of 4 bytes)" in fault.message
    assert fault.source.strip() == "if (i == 63) o[64] = 2;  // out-of-bounds-write"


def test_a_race_names_both_lanes_and_lines() -> None:
    report = launch("bad_race_next_round").report
    line = expected("bad_race_next_round")[1]
    races = [f for f in report.faults if f.line == line]
    assert races
    assert re.search(r"lane \(\d+, 0, 0\) writes byte \d+ of threadgroup variable 's' \(256 bytes\)", races[0].message)
    assert f"read ({FILE}:{line + 2})" in races[0].message


def test_an_unwritten_output_names_the_first_element() -> None:
    (fault,) = launch("bad_output_left_out").report.faults
    assert (fault.kind, fault.buffer) == ("unwritten-output", "o")
    assert "4 of 256 bytes" in fault.message and "element 17" in fault.message


def test_check_lists_faults_with_their_lines() -> None:
    with pytest.raises(lab.LabError, match=r"out-of-bounds-write: lane \(63, 0, 0\)") as e:
        launch("bad_write_beyond").check()
    assert "| if (i == 63) o[64] = 2;" in str(e.value)
    result = launch("bad_same_value")
    with pytest.raises(lab.LabError, match="race-same-value"):
        result.check()
    assert result.check(allow=("race-same-value",)) is result


def test_guard_zone_reads_go_on_and_far_ones_end_the_launch() -> None:
    near = launch("bad_read_beyond")
    assert near.report.kinds() == {"out-of-bounds-read"}
    assert np.array_equal(near.outputs[0][:63], np.arange(1, 64))
    far = launch("bad_read_far_away")
    assert "out-of-bounds-read" in far.report.kinds()
    assert far.outputs[0][0] == 0  # lane 0 came first and read element 0


def test_rounds_count_around_calls() -> None:
    source = """inline float total(float x) { return metal::simd_sum(x); }
    inline float twice(float x) { return 2 * total(x); }
    kernel void f(device float* o, uint i [[thread_position_in_threadgroup]]) {
        float r = 0;
        for (uint k = 0; k < 4; k++) if (k == i % 4 || k == CONDITION) r = twice(1);
        o[i] = r;
    }"""
    o = np.zeros(32, np.float32)

    def run(condition: str) -> lab.Report:
        return lab.run_msl(source, "f", {0: o}, (32, 1, 1), (32, 1, 1), outputs=[0], defines=[condition]).report

    (fault,) = run("CONDITION=4").faults
    assert fault.kind == "simd-divergence" and "in another round of a loop" in fault.message
    assert run("CONDITION=k").faults == ()


def test_what_is_handed_over_by_value_is_counted() -> None:
    source = """struct Part { half4 v[2]; };
    float f(Part p) { return metal::sin(float(p.v[0].x)) + p.v[1].w; }
    kernel void k(device const Part* a, device float* o, uint i [[thread_position_in_grid]]) { o[i] = f(a[i]); }"""
    buffers = {0: np.ones(64 * 8, np.float16), 1: np.zeros(64, np.float32)}
    report = lab.run_msl(source, "k", buffers, (64, 1, 1), (64, 1, 1), outputs=[1]).report
    assert report.faults == ()
    if lab.find_compiler().gcc:
        assert (report.buffers["a"].bytes_read, report.buffers["a"].read_transactions) == (1024, 8)
    assert report.buffers["a"].bytes_read >= 64 * 10  # clang loads the parts that are used


def test_far_too_much_threadgroup_memory() -> None:
    source = """kernel void f(device float* o, threadgroup float* s, uint i [[thread_position_in_threadgroup]]) {
        threadgroup float big[2000000];
        big[i] = s[0] = o[i] = i;
    }"""
    o = np.zeros(1, np.float32)
    report = lab.run_msl(source, "f", {0: o}, (1, 1, 1), (1, 1, 1), threadgroup_memory={0: 16}).report
    assert report.kinds() == {"threadgroup-memory"} and report.threadgroup_bytes == 8000016
    with pytest.raises(lab.LabError, match="2000000 bytes of threadgroup memory; Metal allows 32768"):
        lab.run_msl(source, "f", {0: o}, (1, 1, 1), (1, 1, 1), threadgroup_memory={0: 2000000})


def test_too_many_threads() -> None:
    source = "kernel void f(device float* o, uint i [[thread_position_in_threadgroup]]) { o[i] = i; }"
    ok = lab.run_msl(source, "f", {0: np.zeros(1024, np.float32)}, (1024, 1, 1), (1024, 1, 1), outputs=[0])
    assert ok.report.faults == ()
    bad = lab.run_msl(source, "f", {0: np.zeros(1056, np.float32)}, (1056, 1, 1), (1056, 1, 1), outputs=[0])
    (fault,) = bad.report.faults
    assert fault.kind == "threads" and "1056" in fault.message
    with pytest.raises(lab.LabError, match="8192 threads"):
        lab.run_msl(source, "f", {0: np.zeros(8192, np.float32)}, (8192, 1, 1), (8192, 1, 1), outputs=[0])
