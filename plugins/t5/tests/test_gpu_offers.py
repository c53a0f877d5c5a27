"""Offers for GPUs: what is offered where, and whole models with the lab in the place of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from t5_ternary import calls, gpu_offers, plugin, reference
from t5_ternary.modules import T5Embedding, T5Linear

from backend_core import restore
from backend_core.simt import families
from backend_core.sites import LinearSite
from backend_core.testing.lab_device import LabDevice, lab_device, select


def site(**facts):
    common = {"path": "p", "n": 48, "k": 256, "mode": "t5", "bits": 2, "group_size": 128, "weight_dtype": "uint8",
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
        ({}, ["packed_cuda", "packed_qmm_cuda"]),
        ({"k": 1024}, ["packed_mma_cuda", "packed_cuda", "packed_qmm_cuda"]),
        (
            {"k": 1024, **dict.fromkeys(("x_dtype", "scales_dtype", "out_dtype"), "bfloat16")},
            ["packed_mma_cuda", "packed_cuda", "packed_qmm_cuda"],
        ),
        ({"x_dtype": "float32", "out_dtype": "float32"}, ["packed_cuda"]),
        ({"scales_dtype": "bfloat16", "out_dtype": "float32"}, ["packed_cuda"]),
        ({"k": 128 * 4096}, ["packed_cuda", "packed_qmm_cuda"]),
        ({"device": "metal"}, ["packed_metal", "packed_qmm_metal"]),
        ({"device": "metal", "x_dtype": "float32", "out_dtype": "float32"}, ["packed_metal", "packed_qmm_metal"]),
        ({"kind": "embedding", "k": 1024}, ["packed_mma_cuda", "packed_cuda", "packed_qmm_cuda"]),
        ({"kind": "switch"}, []),
        ({"mode": "affine"}, []),
    ],
)
def test_one_family_of_kernels_for_a_layer(generations, facts, names) -> None:
    made = plugin.select_linear(site(**facts)) or []
    assert [o.name for o in made] == names
    assert [o.rows for o in made] == [(17, None) if "qmm" in name else (1, 16) for name in names]
    assert all(o.row_invariant and o.exactness == "rounding" for o in made)
    # 26 bytes and a scale for each group, x and y.
    if not facts:
        assert made[0].bytes_moved == 48 * 2 * (26 + 2) + 256 * 2 + 48 * 2


def test_older_gpus_get_kernels_they_can_run_or_none(generations) -> None:
    generations["cuda"] = (7, 5)
    assert [o.name for o in gpu_offers.offers(site())] == ["packed_cuda"]
    generations["cuda"] = generations["metal"] = ()
    assert gpu_offers.offers(site()) == gpu_offers.offers(site(device="metal")) == []


def test_every_number_of_rows_has_a_launch_for_at_least_that_many() -> None:
    for family in gpu_offers.FAMILIES:
        assert all(rows <= family.step(rows) <= 2 * rows for rows in range(1, 17))


def test_without_a_gpu_building_is_a_clear_no(generations) -> None:
    if mx.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RuntimeError, match="CUDA"):
        gpu_offers.offers(site())[0].build(linear(48, 256))


def test_arrays_that_do_not_fit_are_refused_with_their_shapes(generations) -> None:
    layer = linear(48, 256)
    layer.scales = layer.scales[:, :1]
    with pytest.raises(ValueError, match=r"scales is \(48, 1\), not \(48, 2\)"):
        gpu_offers.offers(site())[0].build(layer)


@pytest.mark.parametrize(
    ("name", "dtype", "wanted"),
    [
        ("weight", "int8", "uint8"),
        ("scales", "bfloat16", "float16"),
        ("bias", "int32", "float32 or float16 or bfloat16"),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_arrays_of_another_dtype_are_refused_with_the_layer_s_name(generations, device, name, dtype, wanted) -> None:
    layer = linear(48, 512, bias=True)
    layer[name] = layer[name].astype(getattr(mx, dtype))
    for offer in gpu_offers.offers(site(path="layers.3.up", k=512, device=device, has_bias=True)):
        with pytest.raises(ValueError, match=rf"{name} of layers\.3\.up is {dtype}, not {wanted}; store it as"):
            offer.build(layer)


# Whole models


def fill(layer, seed: int):
    rng = np.random.default_rng(seed)
    n, k = layer.output_dims, layer.input_dims
    layer.weight = mx.array(reference.pack(rng.integers(0, 3, (n, k)), layer.group_size))
    layer.scales = mx.array(rng.uniform(0.01, 0.03, layer.scales.shape)).astype(mx.float16)
    if "bias" in layer:
        layer.bias = mx.array(rng.standard_normal(n)).astype(mx.float16)
    mx.eval(layer.parameters())
    return layer


def linear(n: int, k: int, bias: bool = False, seed: int = 0, group: int = 128):
    return fill(T5Linear(k, n, bias, group), seed)


class Model(nn.Module):
    """Three layers behind an embedding, which is an output projection too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = fill(T5Embedding(16, 512), 3)
        self.plain, self.biased = linear(40, 512), linear(40, 512, True, 1)
        self.small = linear(40, 512, False, 2, 64)

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embed(ids)
        return mx.concatenate([self.plain(x) + self.biased(x) + self.small(x), self.embed.as_linear(x)], -1)


@pytest.fixture
def gpu(lab_compiler) -> Iterator[LabDevice]:
    with lab_device() as device:
        yield device


@pytest.mark.lab
@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_a_model_is_verified_and_runs_as_on_a_gpu(gpu, name, monkeypatch) -> None:
    gpu.name = name
    # Rows of so few numbers are not integers, but right.
    monkeypatch.setattr(gpu_offers, "LEAST_K", 512)
    model = Model()
    ids = mx.array([[1, 2, 3]])
    want = np.array(model(ids).astype(mx.float32))
    report = select(model, plugin, "t5")
    label, many = {"metal": "t5/packed_metal", "cuda": "t5/packed_mma_cuda"}[name], f"t5/packed_qmm_{name}"
    for path in ("plain", "biased", "small", "embed"):
        decision = report.decision(path)
        assert [(b.rows, b.chosen) for b in decision.buckets] == [((1, 16), label), ((17, None), many)]
        assert not any("wrong" in loser.reason for loser in decision.losers)
    before = len(gpu.calls)
    have = np.array(model(ids).astype(mx.float32))
    assert len(gpu.calls) == before + 4
    assert np.abs(have - want).max() < 0.02 * np.abs(want).max()
    before, long = len(gpu.calls), mx.array([list(range(16)) + [3, 4, 5]])
    have = np.array(model(long).astype(mx.float32))
    made = ("t5_qmm_simd", 32) if name == "metal" else ("t5_qmm", 128)
    assert [(call.kernel, call.rows) for call in gpu.calls[before:]] == [made] * 4
    assert restore(model) == 4
    want = np.array(model(long).astype(mx.float32))
    assert np.abs(have - want).max() < 0.02 * np.abs(want).max()


@pytest.mark.lab
def test_more_rows_than_an_offer_is_for_are_stock_s(gpu) -> None:
    gpu.name = "cuda"
    layer = linear(48, 256, bias=True)
    f = gpu_offers.offers(site(has_bias=True))[0].build(layer)
    x = mx.random.normal((17, 256), key=mx.random.key(1)).astype(mx.float16)
    assert mx.array_equal(f(x), layer(x)) and not gpu.calls


@pytest.mark.lab
def test_gradients_are_stock_s(gpu) -> None:
    from backend_core import native

    if not native.available():
        pytest.skip("the native module, which tells traces, is not installed")
    gpu.name = "metal"
    layer = linear(48, 256, bias=True)
    f = gpu_offers.offers(site(device="metal", has_bias=True))[0].build(layer)
    x = mx.random.normal((2, 256), key=mx.random.key(7)).astype(mx.float16)
    want, have = (mx.grad(lambda x, g=g: (g(x) ** 2).sum())(x) for g in (layer, f))
    assert mx.array_equal(have, want) and not gpu.calls


@pytest.mark.lab
@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_direct_callers_of_mlx_s_product_get_the_kernel(gpu, name) -> None:
    gpu.name = name
    layer = linear(48, 256)
    x = mx.random.normal((1, 3, 256), key=mx.random.key(5)).astype(mx.float16)
    want = layer(x)
    calls.watch(layer)
    calls.install()
    try:
        have = mx.quantized_matmul(x, layer.weight, layer.scales, None, True, 128, 2)
        # One row to see whether it is right.
        assert [call.rows for call in gpu.calls] == [1, 3 if name == "metal" else 4]
        many = mx.quantized_matmul(mx.repeat(x, 9, 1), layer.weight, layer.scales, None, True, 128, 2)
        assert len(gpu.calls) == 2
    finally:
        calls.uninstall()
    assert have.shape == (1, 3, 48) and have.dtype == mx.float16
    assert np.abs(np.array(have - want)).max() < 0.01 * np.abs(np.array(want)).max()
    assert np.abs(np.array(many[:, ::9] - want)).max() < 0.01 * np.abs(np.array(want)).max()


@pytest.mark.lab
def test_direct_callers_get_mlx_s_own_product_where_the_kernel_is_not_right(gpu) -> None:
    layer = linear(48, 256)
    x = mx.random.normal((1, 256), key=mx.random.key(5)).astype(mx.float16)
    want = layer(x)
    tried = []

    def wrong(*, inputs, output_shapes, output_dtypes):
        tried.append(inputs[0].shape)
        if len(tried) == 2:
            raise RuntimeError("no such function")
        return [mx.ones(output_shapes[0], output_dtypes[0])]

    gpu.bind = lambda kernel, launch, fixed=(): wrong
    calls.install()
    try:
        for _ in range(2):
            other = linear(48, 256)
            calls.watch(other)
            for _ in range(2):
                y = mx.quantized_matmul(x, other.weight, other.scales, None, True, 128, 2)
                assert mx.array_equal(y, want)
    finally:
        calls.uninstall()
    # Once for each layer: a wrong result, and an error.
    assert len(tried) == 2
