"""What kernels call does what Metal says, against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend_core.testing import lab

pytestmark = pytest.mark.lab

FILE = Path(__file__).with_name("functions.metal")
RNG = np.random.default_rng(0)


def run(name: str, *buffers: Any, outputs: list[int], grid: int = 64, **options: Any) -> list[np.ndarray[Any, Any]]:
    result = lab.run_msl(FILE, name, dict(enumerate(buffers)), (grid, 1, 1), (64, 1, 1), outputs=outputs, **options)
    return result.check().outputs


def rows(output: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One row per function, of two SIMD groups."""
    return output.reshape(-1, 2, 32)


def test_reductions() -> None:
    a = RNG.integers(-20, 20, 64).astype(np.float32)
    o = rows(run("reductions", a, np.zeros(64 * 11, np.float32), outputs=[1])[0])
    x = a.reshape(2, 32).astype(np.float64)
    factors = 1 + x / 64

    def spread(v: Any) -> Any:
        return np.repeat(np.asarray(v)[:, None], 32, 1)

    quads = x.reshape(2, 8, 4)
    want = [
        spread(x.sum(1)), spread(factors.prod(1)), spread(x.min(1)), spread(x.max(1)), x.cumsum(1), x.cumsum(1) - x,
        factors.cumprod(1), np.repeat(quads.sum(2), 4, 1), np.repeat(quads.max(2), 4, 1), spread(x.sum(1)),
        spread(2 * x.sum(1)),
    ]  # fmt: skip
    for i, w in enumerate(want):
        np.testing.assert_allclose(o[i], w, rtol=1e-5, err_msg=str(i))


def test_bits() -> None:
    a = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    a[0] = 0
    a[40] = 1
    o = run("bits", a, np.zeros(64 * 12, np.uint32), outputs=[1])[0].reshape(-1, 64)
    x = a.reshape(2, 32)
    for i, f in enumerate((np.bitwise_and, np.bitwise_or, np.bitwise_xor)):
        assert (o[i].reshape(2, 32) == f.reduce(x, axis=1)[:, None]).all()
    votes = ((x & 1).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1)
    assert (o[3].reshape(2, 32) == votes[:, None]).all()
    first = np.tile(np.arange(32) == 0, 2)
    want = np.repeat([0 | 1 << 1, 1 | 1 << 3], 32) | first << 2
    assert (o[4] == want).all()
    for lane, value in enumerate(a.tolist()):
        text = f"{value:032b}"
        counts = (
            text.count("1")
            | (32 - value.bit_length()) << 8
            | (32 if value == 0 else len(text) - 1 - text.rindex("1")) << 16
        )
        assert o[5][lane] == counts
        assert o[6][lane] == value >> 5 & 127
        assert o[7][lane] == (value & ~0xFF00) | 0x5500
        assert o[8][lane] == int(text[::-1], 2)
        assert o[9][lane] == (value << 9 | value >> 23) & 0xFFFFFFFF
        assert o[10][lane] == value * 0x12345678 >> 32
        four = value >> 3 & 15
        assert o[11][lane] == (four - 16 if four >= 8 else four) % 2**32


def test_shuffles() -> None:
    a = np.arange(1, 65, dtype=np.float32)
    o = rows(run("shuffles", a, np.zeros(64 * 16, np.float32), outputs=[1])[0])
    lane = np.arange(32)
    own = lane
    quad = lane // 4 * 4
    from_lane = {
        0: 31 - lane, 1: np.where(lane >= 3, lane - 3, own), 2: np.where(lane + 5 < 32, lane + 5, own), 3: lane ^ 7,
        4: np.full(32, 9), 5: np.zeros(32, int), 8: (lane + 5) % 32, 9: (lane - 5) % 32, 10: quad + 3 - lane % 4,
        11: lane ^ 1, 12: quad + 2, 13: np.where(lane % 4 < 3, lane + 1, own),
        14: np.where(lane % 4 > 0, lane - 1, own),
    }  # fmt: skip
    x = a.reshape(2, 32)
    for row, source in from_lane.items():
        assert (o[row] == x[:, source]).all(), row
    down = np.concatenate([x[:, 5:], -x[:, :5]], axis=1)
    up = np.concatenate([-x[:, 27:], x[:, :27]], axis=1)
    assert (o[6] == down).all() and (o[7] == up).all()
    eights = x.reshape(2, 4, 8)
    assert (o[15] == np.concatenate([eights[:, :, 3:], -eights[:, :, :3]], axis=2).reshape(2, 32)).all()


@pytest.mark.parametrize("name", ["half", "float", "bfloat"])
def test_matrices(name: str) -> None:
    def values(*shape: int) -> Any:
        v = RNG.standard_normal(shape).astype(np.float32)
        return {"half": v.astype(np.float16), "float": v, "bfloat": lab.to_bfloat16(v)}[name]

    a, b = values(10, 16), values(8, 8)
    buffers = {0: a, 1: b, 2: np.zeros(128, np.float32), 3: values(8, 8), 4: np.zeros(64, np.float32)}
    result = lab.run_msl(FILE, f"matrices_{name}", buffers, (32, 1, 1), (32, 1, 1), outputs=[2, 3, 4])
    o, t, e = result.check().outputs
    x, y = lab.to_float32(a).astype(np.float64), lab.to_float32(b).astype(np.float64)
    tile = x[2:, 8:]
    np.testing.assert_allclose(o[:64].reshape(8, 8), tile @ y.T + 2, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(o[64:].reshape(8, 8), 3 * tile, rtol=1e-6)
    assert (lab.to_float32(t) == x[:8, :8].T).all()
    for lane in range(32):
        # The mapping of Apple's GPUs, bit by bit.
        row = (lane >> 4 & 1) << 2 | (lane >> 1 & 3)
        column = (lane >> 3 & 1) << 2 | (lane & 1) << 1
        assert (e[2 * lane : 2 * lane + 2] == x[row, column : column + 2]).all()


def test_vectors() -> None:
    a = RNG.uniform(-3, 3, (64, 4)).astype(np.float32)
    o, p, h, c = run(
        "vectors", a, np.zeros(256, np.float32), np.zeros((64, 3), np.float32), np.zeros((64, 4), np.float16),
        np.zeros((64, 4), np.uint8), outputs=[1, 2, 3, 4],
    )  # fmt: skip
    v = a[:, [1, 0, 2, 3]].copy()
    v[:, 2] += 1
    w = np.concatenate([v[:, :2] * 2, v[:, 2:]], axis=1)[:, ::-1]
    o = o.reshape(4, 64)
    np.testing.assert_allclose(o[0], (v * w).sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(p, v[:, :3] + np.float32([0, 0.5, 0]))
    half = w.astype(np.float16)
    half[:, 3], half[:, 0] = 7, 8
    np.testing.assert_array_equal(h, half)
    np.testing.assert_array_equal(c, np.clip(w * np.float32(10), 0, 255).astype(np.uint8))
    positive = v > 0
    want = np.where(positive.any(1), 1, -1) + np.where(positive.all(1), 10, 0) + 5 + v[:, 2]
    np.testing.assert_allclose(o[1], want, rtol=1e-6)
    q = np.fmod(v[:, :3].astype(np.int32), 3) + np.array([2, 4, 6])
    np.testing.assert_array_equal(o[2], q @ [1, 10, 100])
    np.testing.assert_array_equal(o[3], -v[:, 0] + 2)


def test_maths() -> None:
    a = RNG.uniform(-4, 4, 64).astype(np.float32)
    o = run("maths", a, np.zeros(64 * 15, np.float32), outputs=[1])[0].reshape(-1, 64)
    x = a.astype(np.float64)
    bf = lab.to_float32(lab.to_bfloat16(a)).astype(np.float64)

    def bfloat(v: Any) -> Any:
        return lab.to_float32(lab.to_bfloat16(v))

    h = a.astype(np.float16)
    want = [
        np.exp(x), np.exp2(x), np.log(abs(x) + 1), 1 / np.sqrt(x * x + 1), x * x - 1,
        np.clip(x, -1, 1) + np.sign(x) + (x >= 0.5) + np.clip(x, 0, 1) + x + (2 - x) * 0.25,
        np.rint(x) + np.floor(x) * 100 + np.ceil(x) * 10000 + np.trunc(x) * 0.01,
        np.clip(x, -0.5, 0.5) + np.maximum(x, 1) + abs(x) + abs(np.trunc(x * 3)), np.tanh(x), x > 0,
        (h * h + np.float16(0.1)).astype(np.float64), bfloat(bf * 3), bfloat(np.exp(bf)) + 65504.0,
        abs(x) ** 1.5 + np.fmod(x, 0.75) + np.copysign(2, x) + np.arctan2(x, 2), np.full(64, 2 - 3 + 2.0**40),
    ]  # fmt: skip
    for i, w in enumerate(want):
        np.testing.assert_allclose(o[i], w, rtol=3e-6, atol=2e-6, err_msg=str(i))


def test_atomics() -> None:
    n, lowest, total, tickets = run(
        "atomics", np.zeros(4, np.uint32), np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(128, np.uint32),
        outputs=[3], grid=128,
    )  # fmt: skip
    assert n.tolist() == [128, 2**32 - 1, sum(range(64, 128)), 5]
    assert lowest[0] == -127 and total[0] == 64
    assert sorted(tickets.tolist()) == list(range(128))


def test_positions_with_partial_groups() -> None:
    grid, group = (5, 3, 2), (4, 2, 2)
    (o,) = (
        lab.run_msl(FILE, "positions", {0: np.zeros((2, 3, 5, 24), np.uint32)}, grid, group, outputs=[0])
        .check()
        .outputs
    )
    for z, y, x in np.ndindex(2, 3, 5):
        at, n = (x, y, z), (4, 2, 2)
        local = [a % b for a, b in zip(at, n, strict=True)]
        which = [a // b for a, b in zip(at, n, strict=True)]
        size = [min(b, g - w * b) for b, g, w in zip(n, grid, which, strict=True)]
        index = (local[2] * size[1] + local[1]) * size[0] + local[0]
        simds = -(-size[0] * size[1] * size[2] // 32)
        want = [*at, *local, *which, *size, *n, 5, 3, 2, index, index % 32, index // 32, simds, index % 4, 32]
        assert o[z, y, x].tolist() == want, at


def test_arguments_and_function_constants() -> None:
    a = np.arange(128, dtype=np.float32)
    params = np.frombuffer(np.int32(2).tobytes() + np.float32(0.5).tobytes(), np.uint8)

    def launch(constants: dict[int, Any], **extra: Any) -> np.ndarray[Any, Any]:
        buffers = {0: a, 1: params, 2: np.zeros(64, np.float32), **extra.get("more", {})}
        return lab.run_msl(
            FILE, "arguments", buffers, (64, 1, 1), (64, 1, 1), outputs=[2], threadgroup_memory={0: 256},
            constants=constants,
        ).check().outputs[0]  # fmt: skip

    i = np.arange(64)
    base = (i ^ 1) * 1.0
    table = np.array([10, 20, 30, 40])[i % 4]
    assert (launch({3: 7}) == base * 7 + table).all()
    assert (launch({3: -2, 4: 0.25}) == base * -2 + table + 0.25).all()
    assert (launch({3: 1, 5: True}, more={7: np.float32([100])}) == base + table + 100).all()
    with pytest.raises(lab.LabError, match="no function constant 9"):
        launch({9: 1})
    with pytest.raises(lab.LabError, match=r"threadgroup\(0\)\]\] 'shared' needs its size"):
        lab.run_msl(FILE, "arguments", {0: a, 1: params, 2: a}, (64, 1, 1), (64, 1, 1))
    with pytest.raises(lab.LabError, match=r"buffer\(1\)\]\] 'p' is not bound"):
        lab.run_msl(FILE, "arguments", {0: a, 2: a}, (64, 1, 1), (64, 1, 1))


def test_bfloat16_conversion_rounds_to_nearest_even() -> None:
    values = np.float32([1, 1 + 2**-8, 1 + 3 * 2**-8, -3.14159, 3.4e38, 1e-40, np.inf, np.nan])
    bits = np.asarray(lab.to_bfloat16(values))
    assert bits[:3].tolist() == [0x3F80, 0x3F80, 0x3F82]
    assert bits[3] == 0xC049 and bits[6] == 0x7F80
    assert np.isnan(lab.to_float32(lab.to_bfloat16(values))[7])


def test_packing() -> None:
    a = RNG.uniform(-1.3, 1.3, (64, 4)).astype(np.float32)
    a[0] = [0, 1, -1, 2]
    o, back = run("packing", a, np.zeros(256, np.uint32), np.zeros((128, 4), np.float32), outputs=[1, 2])
    x = a.astype(np.float64)

    def packed(v: Any, low: float, bits: int) -> Any:
        n = np.rint(np.clip(v, low, 1) * (2 ** (bits + (low == 0) - 1) - 1)).astype(np.int64) & (2**bits - 1)
        return (n << np.arange(v.shape[1]) * bits).sum(1)

    assert (o[:64] == packed(x, 0, 8)).all()
    assert (o[64:128] == packed(x, -1, 8)).all()
    assert (o[128:192] == packed(x[:, :2].astype(np.float16).astype(np.float64), 0, 16)).all()
    assert (o[192:] == packed(x[:, 2:], -1, 16)).all()
    assert np.abs(back[:64] - np.clip(x, 0, 1)).max() <= 0.5 / 255 + 1e-6
    assert np.abs(back[64:] - np.clip(x, -1, 1)).max() <= 0.5 / 127 + 1e-6


def test_functions_of_three_and_constants() -> None:
    a = RNG.integers(-60, 60, 64).astype(np.float32)
    o = run("of_three", a, np.zeros(64 * 6, np.float32), outputs=[1])[0].reshape(6, 64)
    three = np.stack([a, np.roll(a, -7), np.roll(a, -11)])
    assert (o[0] == three.min(0)).all() and (o[1] == three.max(0)).all() and (o[2] == np.median(three, 0)).all()
    assert (o[3] == 1 + 2).all()
    n = a.astype(np.int64)
    assert (o[4] == (2**30 * (n + 64) >> 32) + 3 + np.minimum(2**32 + n, 2**31 - 1) % 1000).all()
    x = a.astype(np.float64)
    np.testing.assert_allclose(o[5], np.tan(np.pi * x / 300) + 3.140625 + 2 * x / 3, rtol=1e-5, atol=1e-5)


def test_quads() -> None:
    a = RNG.integers(0, 30, 64, dtype=np.uint32)
    a[:4], a[4:8] = (1, 3, 5, 7), (0, 2, 4, 6)
    o = run("quads", a, np.zeros(64 * 11, np.uint32), outputs=[1])[0].reshape(-1, 16, 4)
    x = a.reshape(16, 4)
    odd = x & 1
    votes = (
        (odd << np.arange(4)).sum(1, keepdims=True) | odd.all(1, keepdims=True) << 8 | odd.any(1, keepdims=True) << 9
    )
    assert (o[0] == (votes | 1 << 10)).all()
    assert (o[1] == x.cumsum(1)).all() and (o[2] == x.cumsum(1) - x).all()
    before = np.concatenate([np.ones((16, 1), np.uint32), x[:, :3]], axis=1)
    assert (o[3] == x.cumprod(1)).all() and (o[4] == before.cumprod(1)).all()
    assert (o[5] == np.roll(x, -3, 1)).all() and (o[6] == np.roll(x, 1, 1)).all()
    assert (o[7] == np.concatenate([x[:, 3:], x[:, :3] + 100], 1)).all()
    assert (o[8] == np.concatenate([x[:, 3:] + 100, x[:, :3]], 1)).all()
    pairs = x.reshape(32, 2)
    assert (o[9].reshape(32, 2) == np.stack([pairs[:, 1], pairs[:, 0] + 100], 1)).all()
    assert (o[10].reshape(32, 2) == np.stack([pairs[:, 1] + 100, pairs[:, 0]], 1)).all()


def test_quads_that_go_their_own_way() -> None:
    a = RNG.integers(0, 30, 64, dtype=np.uint32)
    o = run("quads_apart", a, np.zeros(64, np.uint32), outputs=[1])[0].reshape(16, 4)
    votes = ((a.reshape(16, 4) & 1) << np.arange(4)).sum(1, keepdims=True)
    lane = np.arange(64).reshape(16, 4)
    taken = np.where(lane % 4 < 2, lane + 2, 99)
    assert (o == np.where(lane & 4, votes + 16 * (lane % 4 + 1), 0) + 256 * taken).all()
