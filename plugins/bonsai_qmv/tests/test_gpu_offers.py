"""Offers for GPUs: what is offered where, and whole models with the lab in the place of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from bonsai_qmv import gpu_offers, plugin

from backend_core import race, restore
from backend_core.race import Timing
from backend_core.simt import SimtKernel, families
from backend_core.sites import LinearSite
from backend_core.testing.lab_device import LabDevice, lab_device, select


def site(**facts):
    common = {"path": "p", "n": 48, "k": 256, "mode": "affine", "bits": 2, "group_size": 128, "weight_dtype": "uint32",
              "scales_dtype": "float16", "x_dtype": "float16", "out_dtype": "float16", "device": "cuda"}  # fmt: skip
    return LinearSite(**common | facts)


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    found = {"cuda": (9, 0), "metal": (16,)}
    monkeypatch.setattr(families, "generation", found.get)
    return found


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        ({}, ["affine_mma_cuda", "affine_qmm_cuda"]),
        (dict.fromkeys(("x_dtype", "scales_dtype", "out_dtype"), "bfloat16"), ["affine_mma_cuda", "affine_qmm_cuda"]),
        ({"x_dtype": "float32", "out_dtype": "float32"}, ["affine_cuda"]),
        ({"bits": 3}, ["affine_cuda"]),
        ({"bits": 4, "k": 2048}, ["affine_mma_cuda", "affine_qmm_cuda"]),
        ({"device": "metal"}, ["affine_metal", "affine_qmm_metal"]),
        ({"device": "metal", "x_dtype": "float32", "out_dtype": "float32"}, ["affine_metal", "affine_qmm_metal"]),
        ({"device": "metal", "bits": 3}, ["affine_metal"]),
        ({"kind": "embedding"}, ["affine_mma_cuda", "affine_qmm_cuda"]),
        ({"kind": "switch"}, []),
        ({"mode": "mxfp4"}, []),
        ({"group_size": 16}, []),
    ],
)
def test_one_family_of_kernels_for_a_layer(generations, facts, names) -> None:
    made = plugin.select_linear(site(**facts)) or []
    assert [o.name for o in made] == names
    assert [o.rows for o in made] == [(1, 16), (17, None)][: len(made)]
    assert all(o.row_invariant and o.exactness == "rounding" for o in made)


def test_older_gpus_get_kernels_they_can_run_or_none(generations) -> None:
    generations["cuda"] = (7, 5)
    assert [o.name for o in gpu_offers.offers(site())] == ["affine_cuda"]
    generations["cuda"] = generations["metal"] = ()
    assert gpu_offers.offers(site()) == gpu_offers.offers(site(device="metal")) == []


def test_where_stock_has_no_kernel_all_rows_are_offered(generations) -> None:
    assert [o.rows for o in gpu_offers.offers(site(bits=1))] == [(1, None)]
    assert [o.name for o in gpu_offers.offers(site(bits=1, k=3200))] == ["affine_mma_cuda"]
    both = gpu_offers.offers(site(bits=1, k=3328))
    assert [(o.name, o.rows) for o in both] == [("affine_bits_cuda", (1, None)), ("affine_mma_cuda", (1, None))]
    assert both[0].preference > both[1].preference
    assert [o.rows for o in gpu_offers.offers(site(bits=1, device="metal"))] == [(1, 16), (17, None)]


@pytest.mark.parametrize(
    ("device", "info", "expected"),
    [
        ("cuda", {"compute_capability_major": "9", "compute_capability_minor": "0"}, (9, 0)),
        ("metal", {"architecture": "applegpu_g13s"}, (13,)),
        ("metal", {"architecture": "something else"}, ()),
    ],
)
def test_generations(monkeypatch, device, info, expected) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: info)
    families.generation.cache_clear()
    assert families.generation(device) == expected
    families.generation.cache_clear()


def test_every_number_of_rows_has_a_launch_for_at_least_that_many() -> None:
    for family in gpu_offers.FAMILIES:
        for rows in range(1, 70):
            assert rows <= family.step(rows) <= max(16, rows + 15)
        assert [family.step(1), family.step(16), family.step(17), family.step(64)] == [1, 16, 32, 64]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_symmetric_weights_are_told_exactly(dtype) -> None:
    scales = mx.random.uniform(0.01, 0.03, (40, 9), key=mx.random.key(1)).astype(dtype)
    for r in (1, 2, 4):
        biases = scales * (-0.5 * r)
        assert gpu_offers.symmetric_ratio(scales, biases) == r
        one_off = mx.array(np.array(biases.astype(mx.float32)))
        one_off[39, 8] *= 1.01
        assert gpu_offers.symmetric_ratio(scales, one_off.astype(dtype)) == 0
    assert gpu_offers.symmetric_ratio(scales, -biases) == 0  # biases above zero
    assert gpu_offers.symmetric_ratio(scales, scales * -0.7) == 0
    assert gpu_offers.symmetric_ratio(mx.zeros((2, 2), dtype), mx.zeros((2, 2), dtype)) == 0


def test_without_a_gpu_building_is_a_clear_no(generations) -> None:
    layer = quantized(48, 256, 2)
    if mx.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RuntimeError, match="CUDA"):
        gpu_offers.offers(site())[0].build(layer)


def test_arrays_that_do_not_fit_are_refused_with_their_shapes(generations) -> None:
    layer = quantized(48, 256, 2)
    layer.scales = layer.scales[:, :1]
    with pytest.raises(ValueError, match=r"scales is \(48, 1\), not \(48, 2\)"):
        gpu_offers.offers(site())[0].build(layer)


@pytest.mark.parametrize(
    ("name", "dtype", "wanted"),
    [
        ("weight", "int32", "uint32"),
        ("scales", "bfloat16", "float16"),
        ("biases", "float32", "float16"),
        ("bias", "int32", "float32 or float16 or bfloat16"),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_arrays_of_another_dtype_are_refused_with_the_layer_s_name(generations, device, name, dtype, wanted) -> None:
    layer = quantized(48, 256, 2, symmetric=True, bias=True)
    layer[name] = layer[name].astype(getattr(mx, dtype))
    for offer in gpu_offers.offers(site(path="layers.3.up", device=device, has_bias=True)):
        with pytest.raises(ValueError, match=rf"{name} of layers\.3\.up is {dtype}, not {wanted}; store it as"):
            offer.build(layer)


@pytest.mark.lab
def test_a_bias_of_another_float_dtype_is_served(gpu) -> None:
    layer = quantized(48, 256, 2, bias=True)
    layer.bias = layer.bias.astype(mx.float32)
    f = gpu_offers.offers(site(device="metal", has_bias=True, out_dtype="float32"))[0].build(layer)
    x = mx.random.normal((2, 256), key=mx.random.key(1)).astype(mx.float16)
    want = layer(x.astype(mx.float32))
    assert f(x).dtype == mx.float32 and mx.abs(f(x) - want).max() < 1e-3 * mx.abs(want).max()


# Whole models


def quantized(n: int, k: int, bits: int, symmetric: bool = False, bias: bool = False, seed: int = 0):
    layer = nn.QuantizedLinear(k, n, bias=bias, group_size=128, bits=bits)
    key = mx.random.key(seed)
    layer.weight = mx.random.randint(0, 1 << 30, layer.weight.shape, mx.uint32, key=key) * mx.array(4, mx.uint32)
    layer.scales = mx.random.uniform(0.01, 0.03, layer.scales.shape, key=key).astype(mx.float16)
    layer.biases = layer.scales * (-1.0 if symmetric else -0.6)
    if bias:
        layer.bias = mx.random.normal((n,), key=key).astype(mx.float16)
    mx.eval(layer.parameters())
    return layer


class Model(nn.Module):
    """Three layers of two signatures behind an embedding of halves."""

    def __init__(self, bits: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 256)
        self.embed.weight = mx.random.normal((16, 256), key=mx.random.key(2)).astype(mx.float16)
        self.plain = quantized(40, 256, bits)
        self.symmetric = quantized(40, 256, bits, symmetric=True, seed=1)
        self.biased = quantized(40, 256, bits, bias=True, seed=2)
        mx.eval(self.parameters())

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embed(ids)
        return self.plain(x) + self.symmetric(x) + self.biased(x)


@pytest.fixture
def gpu(lab_compiler) -> Iterator[LabDevice]:
    with lab_device() as device:
        yield device


@pytest.mark.lab
@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_a_model_is_verified_and_runs_as_on_a_gpu(gpu, name) -> None:
    gpu.name = name
    model = Model()
    ids = mx.array([[1, 2, 3]])
    want = np.array(model(ids).astype(mx.float32))
    report = select(model, plugin, "bonsai_qmv")
    label = {"metal": "bonsai_qmv/affine_metal", "cuda": "bonsai_qmv/affine_mma_cuda"}[name]
    many = f"bonsai_qmv/affine_qmm_{name}"
    for path in ("plain", "symmetric", "biased"):
        decision = report.decision(path)
        assert [(b.rows, b.chosen) for b in decision.buckets] == [((1, 16), label), ((17, None), many)]
        assert not any("wrong" in loser.reason for loser in decision.losers)
    before = len(gpu.calls)
    have = np.array(model(ids).astype(mx.float32))
    assert len(gpu.calls) == before + 3
    assert np.abs(have - want).max() < 0.02 * np.abs(want).max()
    # Biases that follow from the scales are not even bound.
    assert [call.launch.value("SYMMETRIC") for call in gpu.calls[before:]] == [0, 2, 0]
    before, long = len(gpu.calls), mx.array([list(range(16)) + [3, 4, 5]])
    have = np.array(model(long).astype(mx.float32))
    kernel, made = {"metal": ("affine_qmm_simd", 32), "cuda": ("affine_qmm", 128)}[name]
    assert [(call.kernel, call.rows) for call in gpu.calls[before:]] == [(kernel, made)] * 3
    assert restore(model) == 3
    want = np.array(model(long).astype(mx.float32))
    assert np.abs(have - want).max() < 0.02 * np.abs(want).max()


def test_calls_of_shapes_that_were_seen_are_told_once(generations, monkeypatch) -> None:
    told, ahead = [], []

    class Call:
        def __init__(self, launch, fixed):
            self.launch, self.fixed = launch, fixed

        def __call__(self, *, inputs, output_shapes, output_dtypes):
            told.append((inputs[0].shape, output_shapes, output_dtypes, len(self.fixed)))
            # A node with just these inputs, as a kernel's is.
            return [mx.quantized_matmul(inputs[0], *self.fixed[:3], True, 128, 2)]

    kernel = SimtKernel
    monkeypatch.setattr(kernel, "bind", lambda self, device, launch, fixed: Call(launch, fixed))
    monkeypatch.setattr(kernel, "compile_ahead", lambda self, launches, inputs, dtypes: ahead.append(len(launches)))
    layer = quantized(48, 256, 2)
    layer.biases = mx.random.normal(layer.biases.shape).astype(mx.float16)
    f = gpu_offers.offers(site())[0].build(layer)
    stock = lambda x: mx.quantized_matmul(x, layer.weight, layer.scales, layer.biases, True, 128, 2)  # noqa: E731
    shapes = ((1, 1, 256), (1, 1, 256), (1, 4, 256), (1, 4, 256))
    for shape in shapes:
        x = mx.random.normal(shape).astype(mx.float16)
        assert mx.array_equal(f(x), stock(x))
    first = [((1, 1, 256), [(1, 1, 48)], [mx.float16]), ((1, 4, 256), [(1, 4, 48)], [mx.float16])]
    assert [t[:3] for t in told] == (first if told[0][3] == 3 else [t for t in first for _ in range(2)])
    # Compiled for all rows before the first call, and not before.
    assert ahead == [len(gpu_offers.FAMILIES[0].steps)]


@pytest.mark.lab
def test_one_bit_runs_at_any_number_of_rows_where_stock_has_no_kernel(gpu, monkeypatch) -> None:
    gpu.name = "cuda"
    monkeypatch.setattr(race, "race", lambda probe, modules, ours, rows, device, **_: {
        m: Timing(1e-5, 1e5, 0.0, "stock fails (ValueError: 1 is not supported)") for m in rows})  # fmt: skip
    whole = Model(bits=1)
    model = nn.Sequential(whole.embed, whole.plain)
    report = select(model, plugin, "bonsai_qmv")
    assert [(b.rows, b.chosen) for b in report.decision("layers.1").buckets] == [
        ((1, 16), "bonsai_qmv/affine_mma_cuda"), ((17, None), "bonsai_qmv/affine_mma_cuda"),
    ]  # fmt: skip
    before = len(gpu.calls)
    mx.eval(model(mx.array([list(range(16)) + [3, 4, 5]])))
    assert [call.rows for call in gpu.calls[before:]] == [128]


@pytest.mark.lab
def test_a_kernel_that_does_not_compile_lost_with_the_compiler_s_message(gpu) -> None:
    gpu.header = '\n#line 70 "affine_qmv.metal"\nconstant int broken = missing;\n'
    gpu.name = "metal"
    report = select(Model(), plugin, "bonsai_qmv")
    for path in ("plain", "symmetric", "biased"):
        decision = report.decision(path)
        assert decision.chosen == "stock"
        reasons = {loser.offer: loser.reason for loser in decision.losers}
        assert "affine_qmv.metal:70" in reasons["bonsai_qmv/affine_metal"]
    # Each offer for two layers of the group of two, one of the other; no further attempts.
    assert gpu.failed == 6


@pytest.mark.lab
def test_a_text_that_the_run_time_compiler_refuses_is_served_by_mlx_and_said(lab_compiler) -> None:
    message = 'affine_mma does not compile: affine_mma.metal(70): error: identifier "missing" is undefined\n1 error'
    with lab_device("cuda", refuses=message) as gpu:
        # Named and strict: a plugin that is served by the fallback serves.
        report = select(Model(), plugin, "bonsai_qmv", plugins="bonsai_qmv", strict=True)
    assert gpu.calls and not gpu.failed
    label = "bonsai_qmv/affine_mma_cuda"
    for path in ("plain", "symmetric", "biased"):
        decision = report.decision(path)
        assert decision.chosen == label
        (note,) = decision.as_dict()["offers"][label]["notes"]
        assert "'affine_mma'" in note and "without bounds on registers" in note and message in note
    said = [s for s in report.as_dict()["notes"] if message in s]
    assert len(said) == 2 and said[0].startswith(f"{label}: kernel 'affine_mma'")
    assert "affine_mma.metal(70)" in report.line() and "1 error" not in report.line()


@pytest.mark.lab
def test_gradients_are_stock_s(gpu) -> None:
    gpu.name = "metal"
    model = Model()
    x = mx.random.normal((2, 256), key=mx.random.key(7)).astype(mx.float16)

    def total(x):
        return (model.plain(x) ** 2).sum()

    want = mx.grad(total)(x)
    select(model, plugin, "bonsai_qmv")
    from backend_core import native

    if not native.available():
        pytest.skip("the native module, which tells traces, is not installed")
    assert mx.array_equal(mx.grad(total)(x), want)


@pytest.mark.lab
def test_one_bit_layers_can_be_differentiated_where_stock_has_no_kernel(gpu, monkeypatch) -> None:
    gpu.name = "cuda"
    model = Model(bits=1)
    ids = mx.array([[1, 2, 3]])

    def loss(embedding: mx.array) -> mx.array:
        model.embed.weight = embedding
        return model(ids).astype(mx.float32).square().sum()

    start = model.embed.weight
    want = np.array(mx.grad(loss)(start.astype(mx.float32)))
    model.embed.weight = start
    select(model, plugin, "bonsai_qmv")

    def missing(*_):
        raise ValueError("1 is not supported")

    monkeypatch.setattr(mx, "quantized_matmul", missing)
    have = np.array(mx.grad(loss)(start).astype(mx.float32))
    assert np.abs(want).max() > 0
    assert np.abs(have - want).max() < 0.01 * np.abs(want).max()
