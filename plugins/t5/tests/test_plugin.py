"""Hooks and products inside mlx: dtypes, laziness, compile, gradients, and whole models through the core."""

import mlx.core as mx
import numpy as np
import pytest
import t5_checkpoints as cp
from t5_ternary import convert, modules, plugin, product, reference

from backend_core import LinearSite, Policy, accelerate, report_of, restore

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def layer(n=24, k=256, group=128, bias=True, dtype=mx.float32, seed=0) -> modules.T5Linear:
    made = modules.T5Linear(k, n, bias, group, dtype)
    made.weight = mx.array(reference.pack(cp.random_trits(seed, n, k), group))
    made.scales = mx.random.uniform(0.02, 0.1, (n, k // group), key=mx.random.key(seed)).astype(dtype)
    if bias:
        made.bias = mx.random.normal((n,), key=mx.random.key(seed + 1)).astype(dtype)
    mx.eval(made.parameters())
    return made


def site(**changes) -> LinearSite:
    facts = {"path": "p", "n": 24, "k": 256, "mode": "t5", "bits": 2, "group_size": 128, "weight_dtype": "uint8",
             "scales_dtype": "float16"}  # fmt: skip
    return LinearSite(**{**facts, **changes})


def test_offers():
    offer = plugin.select_linear(site())
    assert (offer.name, offer.exactness, offer.row_invariant, offer.copies) == ("packed", "rounding", True, 0)
    # 0.21875 bytes a weight, x and y in float32.
    assert offer.bytes_moved == 24 * 256 * 28 // 128 + 4 * (256 + 24)
    assert plugin.select_linear(site(kind="embedding")) is not None
    assert plugin.select_linear(site(kind="switch", batch=4)).name == "experts"
    assert plugin.select_linear(site(kind="switch", batch=4, device="metal")) is None
    for other in ({"mode": "affine"}, {"device": "metal"}, {"kind": "multi"}, {"x_dtype": "int32"}):
        assert plugin.select_linear(site(**other)) is None


def test_sizes():
    assert layer(bias=False, dtype=mx.float16).weight.nbytes == 24 * 52
    assert "input_dims=256, output_dims=24, group_size=128, bias" in repr(layer())
    made = layer()
    made.unfreeze()
    assert not made.trainable_parameters()


@pytest.mark.parametrize("xd", FLOATS)
@pytest.mark.parametrize("sd", FLOATS)
def test_result_dtypes_are_those_of_the_layer(xd, sd):
    made = layer(dtype=sd)
    x = mx.random.normal((2, 3, 256), key=mx.random.key(1)).astype(xd)
    ours, own = product.build(made)(x), made(x)
    assert ours.dtype == own.dtype and ours.shape == own.shape == (2, 3, 24)
    assert mx.abs(ours.astype(mx.float32) - own.astype(mx.float32)).max().item() < 0.1


@pytest.mark.parametrize("group", [64, 128])
def test_values(group):
    made = layer(40, 640, group, dtype=mx.float16)
    w = reference.dequantize64(np.array(made.weight), np.array(made.scales), group)
    for rows in (1, 5, 16, 40):
        x = mx.random.normal((rows, 640), key=mx.random.key(rows))
        bias = np.array(made.bias.astype(mx.float32))
        y64, allowed = reference.bound(np.array(x), w, "float32", bias)
        assert (np.abs(np.array(product.build(made)(x)) - y64) <= allowed).all()
        assert np.abs(np.array(made(x)) - y64).max() < 1e-4


def test_lazy_views_and_compile():
    made = layer()
    f = product.build(made)
    x = mx.random.normal((6, 4, 512), key=mx.random.key(3))
    for view in (x[:, 1, :256], x[..., ::2], x.transpose(1, 0, 2)[..., 256:], x[:, :, 0:256] * 2 + 1):
        assert mx.abs(f(view) - made(view)).max().item() < 1e-5
    for shapeless in (False, True):
        compiled = mx.compile(lambda x: mx.tanh(f(x * 2)) + 1, shapeless=shapeless)
        for rows in (1, 3, 20):
            x = mx.random.normal((rows, 256), key=mx.random.key(rows))
            assert mx.abs(compiled(x) - (mx.tanh(made(x * 2)) + 1)).max().item() < 1e-5


def test_gradients():
    made = layer()
    x = mx.random.normal((2, 3, 256), key=mx.random.key(4))

    def ours(x, scales, bias):
        return (product.build({"weight": made.weight, "scales": scales, "bias": bias})(x) ** 2).sum()

    def own(x, scales, bias):
        w, s, b = (convert.to_affine(np.array(made.weight), 128), scales, -scales)
        return ((mx.quantized_matmul(x, mx.array(w), s, b, True, 128, 2) + bias) ** 2).sum()

    for argnums in ((0,), (0, 1, 2)):
        got = mx.grad(ours, argnums=argnums)(x, made.scales, made.bias)
        want = mx.grad(own, argnums=argnums)(x, made.scales, made.bias)
        got, want = (got, want) if len(argnums) > 1 else ([got], [want])
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and mx.abs(a - b).max().item() <= 1e-4 * mx.abs(b).max().item()


def test_build_names_what_does_not_fit():
    with pytest.raises(ValueError, match="not those of a t5 matrix"):
        product.build({"weight": mx.zeros((4, 25), mx.uint8), "scales": mx.zeros((4, 2))})


def test_embedding_rows():
    made = modules.T5Embedding(96, 128, 64, mx.bfloat16)
    made.weight = mx.array(reference.pack(cp.random_trits(5, 96, 128), 64))
    made.scales = mx.random.uniform(0.02, 0.1, (96, 2), key=mx.random.key(1)).astype(mx.bfloat16)
    w = reference.dequantize64(np.array(made.weight), np.array(made.scales.astype(mx.float32)), 64)
    rows = made.rows(mx.array([[3, 95], [0, 3]]), mx.float32)
    assert rows.shape == (2, 2, 128) and np.array_equal(np.array(rows), w[[[3, 95], [0, 3]]].astype(np.float32))
    looked = made(mx.array([7]))
    assert looked.dtype == mx.bfloat16 and np.array_equal(np.array(looked.astype(mx.float32))[0], w[7])


@pytest.mark.parametrize("experts", [2, 6])
def test_switch(experts):
    """Few and many experts asked for; against one product per expert."""
    made = modules.T5SwitchLinear(128, 40, experts, True, 64, mx.float32)
    packed = reference.pack(cp.random_trits(1, experts * 40, 128), 64).reshape(experts, 40, 26)
    made.weight = mx.array(packed)
    made.scales = mx.random.uniform(0.02, 0.1, (experts, 40, 2), key=mx.random.key(1))
    made.bias = mx.random.normal((experts, 40), key=mx.random.key(2))
    x = mx.random.normal((1, 2, 1, 1, 128), key=mx.random.key(3))
    chosen = mx.array([[[1, 0], [experts - 1, 1]]], mx.uint32)
    y = np.array(made(x, chosen))
    assert y.shape == (1, 2, 2, 1, 40)
    for t in range(2):
        for j in range(2):
            e = int(chosen[0, t, j])
            w = reference.dequantize64(packed[e], np.array(made.scales[e]), 64)
            want = np.array(x[0, t, 0]).astype(np.float64) @ w.T + np.array(made.bias[e])
            assert np.abs(y[0, t, j] - want).max() < 1e-5


@pytest.mark.parametrize("name,group", [("llama", 64), ("llama", 128)])
def test_a_model_through_the_core(tmp_path, name, group):
    """Verified, installed, joined; logits within rounding of float32 and the same greedy tokens as the 2-bit model."""
    import mlx_lm
    from mlx_lm.generate import generate_step
    from t5_ternary import repack

    from backend_core import load

    source = cp.save(cp.build(name, group), name, tmp_path / "src", group=group)
    repack.write(repack.plan(source), tmp_path / "t5")
    policy = Policy(deterministic=True, activations="float32", report="none", plugin_options=(("t5", "packed"),))
    model, _ = load(tmp_path / "t5", policy)
    report = report_of(model)
    t5 = [d for d in report.decisions if getattr(d.site, "mode", "") == "t5"]
    assert len(t5) == 15 and {d.chosen for d in t5} == {"t5/packed"}
    assert not any("failed" in n for n in report.notes), report.notes
    two, _ = mlx_lm.load(str(source))
    accelerate(two, Policy(deterministic=True, activations="float32", report="none"))
    tokens = mx.array([[5, 9, 200, 31, 77, 1]])
    a, b = model(tokens), two(tokens)
    assert a.dtype == b.dtype == mx.float32 and mx.abs(a - b).max().item() < 1e-4 * mx.abs(b).max().item()
    prompt = mx.array([3, 8, 1, 90])
    found = [[int(t) for t, _ in generate_step(prompt, m, max_tokens=24)] for m in (model, two)]
    assert found[0] == found[1]
    restore(model)
    assert type(model.layers[0].mlp.up_proj) is modules.T5Linear
