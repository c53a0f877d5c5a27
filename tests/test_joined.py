"""Joined blocks: the bits of the separate parts, whatever the cache, and nothing where anything is unusual."""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_models
from mlx_lm.models import cache as caches
from mlx_lm.models import llama
from test_models import close, snapshot

from backend_core import Policy, accelerate, joined, joined_stack, native, restore
from backend_core.integrations import scope
from backend_core.walk_blocks import AttentionForm, LayerForm, MLPForm, code_hash, form_of

pytest.importorskip("bonsai_qmv")
pytest.importorskip("host_ops")
pytest.importorskip("cider_sdpa")
pytestmark = [
    pytest.mark.skipif(not native.available(), reason=native.status().reason or "native"),
    pytest.mark.usefixtures("installed_plugins"),
]

POLICY = Policy(deterministic=True, activations="model")
STEPS = (list(range(1, 24)), [11], [8, 6, 3], [5], list(range(30, 47)))


made: list[nn.Module] = []


@pytest.fixture(autouse=True)
def restored():
    """Models share some modules (default arguments), which must be stock again."""
    yield
    while made:
        restore(made.pop())


def model(name="llama", **options):
    m = tiny_models.build(name, **{"bits": 4, **options})
    made.append(m)
    return m


def parts_of(monkeypatch, m, policy=POLICY):
    with monkeypatch.context() as p:
        p.setattr(joined, "find", lambda *_: [])
        return accelerate(m, policy)


def layers_of(monkeypatch, m, policy=POLICY):
    """Joined layers, one by one."""
    with monkeypatch.context() as p:
        p.setattr(joined_stack, "find", lambda *_: [])
        return accelerate(m, policy)


def blocks(report):
    return [d for d in report.decisions if d.site.hook == "join"]


def run(m, steps=STEPS, make=None):
    cache = caches.make_prompt_cache(m) if make is None else make(m)
    out = []
    for step in steps:
        tokens = mx.array(step if isinstance(step[0], list) else [step])
        out.append(np.array(m(tokens, cache=cache).astype(mx.float32)))
    return out


def same_bits(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


def both(monkeypatch, build, **options):
    """(results in parts, results joined), asserting that blocks were joined."""
    one, two = build(), build()
    parts_of(monkeypatch, one)
    report = accelerate(two, POLICY)
    assert blocks(report)
    return run(one, **options), run(two, **options)


CACHES = {
    "KVCache": None,
    "no cache": lambda m: None,
    "rotating": lambda m: [caches.RotatingKVCache(max_size=16, keep=4) for _ in m.layers],
    "quantized": lambda m: [caches.QuantizedKVCache(group_size=32, bits=8) for _ in m.layers],
    "concatenating": lambda m: [caches.ConcatenateKVCache() for _ in m.layers],
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_same_bits_as_in_parts(monkeypatch, name, kind):
    same_bits(*both(monkeypatch, lambda: model(name), make=CACHES[kind]))


#: Family -> kinds of what is joined, and layers that are one operation for a token.
FAMILIES = {
    "llama": ({"layer", "stack"}, 2),
    "qwen2": ({"layer", "stack"}, 2),
    "qwen3": ({"layer", "stack"}, 2),
    "gemma": ({"layer"}, 2),  # embeddings are multiplied before the layers
    "gemma2": ({"mlp"}, 0),  # its attention is its own
    "gemma3": ({"layer"}, 3),
    "olmo2": ({"layer", "stack"}, 2),
    "phi3": ({"layer", "stack"}, 2),
    "smollm3": ({"layer", "stack"}, 4),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families(monkeypatch, name, dtype):
    one, two = model(name, dtype=dtype), model(name, dtype=dtype)
    stock, before = run(two), snapshot(two)
    parts_of(monkeypatch, one)
    report = accelerate(two, POLICY)
    kinds, whole = FAMILIES[name]
    assert {d.site.kind for d in blocks(report)} == kinds
    plans = [layer.__dict__.get("_accel_joined", (None,))[0] for layer in two.layers]
    assert sum(getattr(p, "decode", None) is not None for p in plans) == whole
    have = run(two)
    same_bits(run(one), have)
    if dtype == "float32":
        close([mx.array(y) for y in stock], [mx.array(y) for y in have])
    assert bool(report.unjoined) == ("layer" not in kinds)
    restore(two)
    assert snapshot(two) == before
    same_bits(run(two), stock)


def test_sums_that_are_clipped_run_in_parts(monkeypatch):
    m = model("gemma3", dtype="float16")
    report = accelerate(m, POLICY)
    assert {d.site.kind for d in blocks(report)} == {"attention", "mlp"}
    [(reason, paths)] = report.unjoined.items()
    assert "clipped" in reason and len(paths) == 3


def test_layers_whose_code_is_not_known_are_reported():
    m = model("gpt_oss")
    report = accelerate(m, POLICY)
    assert report.unjoined == {"its code is not known": ["model.layers.0", "model.layers.1"]}
    assert report.as_dict()["unjoined"] == report.unjoined


def test_activations_that_blocks_write_out(monkeypatch):
    m = model("gemma2")
    mlp = m.layers[0].mlp
    x = mx.random.normal((16, 1, 128), key=mx.random.key(0))
    want = mlp(x)
    parts_of(monkeypatch, m)
    assert scope.gated_of(mlp) is not None
    have = mlp(x)
    close([want], [have])
    for i in (0, 7, 15):
        assert np.array(mlp(x[i : i + 1])).tobytes() == np.array(have[i : i + 1]).tobytes()
    half = x.astype(mx.float16)
    assert mlp(half).dtype == mx.float16 or mlp(half).dtype == mx.float32
    assert mlp(mx.zeros((0, 1, 128))).shape == (0, 1, 128)
    restore(m)
    assert scope.gated_of(mlp) is None and mx.array_equal(mlp(x), want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(monkeypatch, dtype):
    same_bits(*both(monkeypatch, lambda: model(dtype=dtype)))


def test_activations_in_float32(monkeypatch):
    one, two = model(dtype="float16"), model(dtype="float16")
    policy = Policy(deterministic=True, activations="float32")
    parts_of(monkeypatch, one, policy)
    assert blocks(accelerate(two, policy))
    same_bits(run(one), run(two))


def test_batches(monkeypatch):
    steps = ([[1, 2, 3], [4, 5, 6]], [[7], [8]], [[9, 1], [2, 3]])
    same_bits(*both(monkeypatch, model, steps=steps))


def test_a_cache_with_a_position_per_sequence_runs_in_parts(monkeypatch):
    def make(m):
        return [caches.BatchKVCache([1, 0]) for _ in m.layers]

    same_bits(*both(monkeypatch, model, steps=([[0, 2, 3], [4, 5, 6]], [[7], [8]]), make=make))


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"mlp_bias": True}, {"rope_traditional": True}])
def test_other_llamas(monkeypatch, change):
    same_bits(*both(monkeypatch, lambda: model(**change)))


SCALINGS = {
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    # Its base changes with the length: positions are turned separately.
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
def test_positions_with_frequencies(monkeypatch, scaling):
    options = {"rope_scaling": SCALINGS[scaling], "max_position_embeddings": 256}
    same_bits(*both(monkeypatch, lambda: model(**options)))


def test_blocks_of_layers_that_are_not_known():
    m = model("qwen3_moe")
    want = [np.array(y) for y in tiny_models.logits(m)]
    kinds = {d.site.kind for d in blocks(accelerate(m, POLICY))}
    assert kinds == {"attention"}
    close([mx.array(y) for y in want], tiny_models.logits(m))


def test_one_decision_per_block_and_the_line():
    m = model()
    report = accelerate(m, POLICY)
    assert [d.site.path for d in blocks(report)] == ["model.layers.0", "model.layers.1", "model"]
    assert all(d.chosen == "core/joined" for d in blocks(report))
    assert "joined: 2 layer, 1 stack" in report.line()
    assert sum(report.counts().values()) == len(report.decisions) - 3
    assert report.decision("model.layers.1", "join").site.kind == "layer"


@pytest.mark.parametrize("others_hold", [False, True])
def test_few_nodes(tmp_path, others_hold):
    """A token is one node for the stack, and none if it is evaluated at once."""
    m = model()
    accelerate(m, POLICY)
    cache = caches.make_prompt_cache(m)
    mx.eval(m(mx.array([[1, 2, 3]]), cache=cache), [c.state for c in cache])
    held = [c.keys for c in cache] if others_hold else None
    mx.export_to_dot(str(tmp_path / "graph.dot"), m(mx.array([[5]]), cache=cache))
    text = (tmp_path / "graph.dot").read_text()
    assert text.count("accel/stack") == (held is not None) and "accel/layer" not in text
    assert "host_ops/rope" not in text and "Transpose" not in text


def test_functions_that_others_have_put_there_are_called(monkeypatch):
    m = model()
    accelerate(m, POLICY)
    seen = []
    update, attend = caches.KVCache.update_and_fetch, llama.scaled_dot_product_attention
    want = run(m)
    with monkeypatch.context() as p:
        p.setattr(caches.KVCache, "update_and_fetch", lambda self, *a: (seen.append("cache"), update(self, *a))[1])
        same_bits(run(m), want)
    with monkeypatch.context() as p:
        p.setattr(llama, "scaled_dot_product_attention", lambda *a, **k: (seen.append("sdpa"), attend(*a, **k))[1])
        same_bits(run(m), want)
    assert seen.count("cache") == seen.count("sdpa") == len(STEPS) * 2


def test_a_cache_is_written_in_place_and_not_where_others_hold_it():
    m = model()
    accelerate(m, POLICY)
    cache = caches.make_prompt_cache(m)
    mx.eval(m(mx.array([[1, 2, 3]]), cache=cache), [c.state for c in cache])
    address = lambda c: np.asarray(memoryview(c.keys)).ctypes.data  # noqa: E731
    before = [address(c) for c in cache]
    for t in (4, 5):
        mx.eval(m(mx.array([[t]]), cache=cache))
    assert [address(c) for c in cache] == before
    held = [(c.keys, np.array(c.keys)) for c in cache]
    mx.eval(m(mx.array([[6]]), cache=cache))
    assert all(np.array(k).tobytes() == v.tobytes() for k, v in held)
    assert not set(before) & {address(c) for c in cache}


def test_a_cache_grows_and_shrinks(monkeypatch):
    steps = (list(range(1, 251)), *([i] for i in range(1, 12)))
    same_bits(*both(monkeypatch, model, steps=steps))
    one, two = model(), model()
    parts_of(monkeypatch, one)
    accelerate(two, POLICY)
    results = []
    for m in (one, two):
        cache = caches.make_prompt_cache(m)
        out = [m(mx.array([[1, 2, 3, 4]]), cache=cache)]
        caches.trim_prompt_cache(cache, 2)
        out += [m(mx.array([[t]]), cache=cache) for t in (7, 8)]
        results.append([np.array(y) for y in out])
    same_bits(*results)


def test_restore_gives_everything_back():
    m = model()
    before = snapshot(m)
    want = run(m)
    accelerate(m, POLICY)
    run(m)
    restore(m)
    assert snapshot(m) == before
    same_bits(run(m), want)


def test_the_model_can_be_freed():
    m = tiny_models.build("llama", bits=4)
    accelerate(m, POLICY)
    run(m)
    seen = [weakref.ref(m), weakref.ref(m.model.layers[0]), weakref.ref(m.model.layers[0].self_attn.q_proj)]
    del m
    gc.collect()
    assert [r() for r in seen] == [None] * 3


CHANGES = {
    "weights replaced": lambda layer: layer.mlp.up_proj.update({"scales": layer.mlp.up_proj.scales * 1.5}),
    "weights changed in place": lambda layer: layer.self_attn.o_proj.__setitem__(
        "scales", layer.self_attn.o_proj.scales * 0.5
    ),
    "norm changed": lambda layer: layer.post_attention_layernorm.update(
        {"weight": layer.post_attention_layernorm.weight * 2}
    ),
    "layer replaced": lambda layer: layer.self_attn.__setattr__("k_proj", nn.Linear(96, 64, bias=False)),
    "block replaced": lambda layer: layer.__setattr__("mlp", nn.Linear(96, 96, bias=False)),
    "a part restored": lambda layer: restore(layer.mlp),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_runs_in_parts(monkeypatch, change):
    one, two = model(), model()
    parts_of(monkeypatch, one)
    accelerate(two, POLICY)
    for m in (one, two):
        mx.random.seed(3)
        CHANGES[change](m.model.layers[1])
        mx.eval(m.parameters())
    same_bits(run(one), run(two))


def test_adapters_over_an_accelerated_model(monkeypatch):
    from mlx_lm.tuner.utils import linear_to_lora_layers

    one, two = model(), model()
    parts_of(monkeypatch, one)
    accelerate(two, POLICY)
    for m in (one, two):
        mx.random.seed(5)
        linear_to_lora_layers(m, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]})
        mx.eval(m.parameters())
    same_bits(run(one), run(two))


def test_gradients_are_those_of_the_parts(monkeypatch):
    one, two = model(), model()
    parts_of(monkeypatch, one)
    accelerate(two, POLICY)
    x = mx.random.normal((1, 3, 96), key=mx.random.key(1))
    grads = [mx.grad(lambda x, m=m: (m.model.layers[0](x, "causal", None) ** 2).sum())(x) for m in (one, two)]
    same_bits([np.array(grads[0])], [np.array(grads[1])])


def test_compiled(monkeypatch):
    one, two = model(), model()
    parts_of(monkeypatch, one)
    accelerate(two, POLICY)
    for shapeless in (False, True):
        fs = [mx.compile(m.model.layers[0], shapeless=shapeless) for m in (one, two)]
        for rows in (1, 3):
            x = mx.random.normal((1, rows, 96), key=mx.random.key(rows))
            same_bits([np.array(fs[0](x))], [np.array(fs[1](x))])


@pytest.mark.parametrize("shape", [(96,), (2, 96), (0, 1, 96), (1, 0, 96), (1, 1, 1, 96)])
def test_unusual_shapes_are_stocks(shape):
    m = model()
    mlp = m.model.layers[0].mlp
    x = mx.random.normal(shape)
    accelerate(m, POLICY)
    assert mlp(x).shape == shape


def test_other_dtypes_run_in_parts(monkeypatch):
    one, two = model(), model()
    parts_of(monkeypatch, one)
    accelerate(two, POLICY)
    x = mx.random.normal((1, 2, 96), key=mx.random.key(1)).astype(mx.float16)
    y, z = (m.model.layers[1](x, "causal", None) for m in (one, two))
    assert y.dtype == z.dtype
    close([y], [z])


def test_rows_do_not_depend_on_each_other():
    m = model()
    accelerate(m, POLICY)
    layer = m.model.layers[0]
    x = mx.random.normal((16, 1, 96), key=mx.random.key(1))
    whole = np.array(layer(x))
    for rows in (1, 2, 5, 16):
        assert np.array(layer(x[:rows])).tobytes() == whole[:rows].tobytes()


def test_thread_counts_do_not_change_bits():
    m = model()
    accelerate(m, POLICY)
    before = native.get().threads()
    try:
        results = []
        for threads in (1, 2, 3, 8):
            native.get().set_threads(threads)
            results.append(run(m))
    finally:
        native.get().set_threads(before)
    for r in results[1:]:
        same_bits(results[0], r)


def test_a_wrong_joined_block_is_not_used(monkeypatch):
    right = joined.JoinedAttention.__call__
    monkeypatch.setattr(
        joined.JoinedAttention, "__call__", lambda self, *a: right(self, *a) * (1 + 1e-6)
    )  # an ulp or two
    m = model()
    report = accelerate(m, POLICY)
    assert not [d for d in blocks(report) if d.site.kind == "layer"]
    assert any("core/joined failed verification at 4 sites" in note for note in report.notes)
    assert not any("_accel_joined" in layer.__dict__ for layer in m.model.layers)


def test_a_race_that_is_lost_leaves_parts(monkeypatch):
    import time

    right = joined.JoinedAttention.__call__

    def slow(self, *args):
        time.sleep(0.002)
        return right(self, *args)

    monkeypatch.setattr(joined.JoinedAttention, "__call__", slow)
    m = model()
    report = accelerate(m, Policy(activations="model"))
    assert not [d for d in blocks(report) if d.site.kind == "layer"]


def test_an_interrupt_leaves_the_model_stock(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(joined, "find", interrupt)
    m = model()
    before = snapshot(m)
    with pytest.raises(KeyboardInterrupt):
        accelerate(m, POLICY)
    assert snapshot(m) == before


# Recognition


def test_known_forms():
    assert form_of(llama.Attention) == AttentionForm()
    assert form_of(llama.MLP) == MLPForm()
    assert form_of(llama.TransformerBlock) == LayerForm()
    assert form_of(llama.Model) is None and form_of(nn.Linear) is None


def test_code_is_known_by_what_it_computes():
    class Same(nn.Module):
        # Another comment, no annotations.
        def __call__(self, x):
            """A docstring."""
            return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # noqa: F821

    class Other(nn.Module):
        def __call__(self, x):
            return self.down_proj(swiglu(self.up_proj(x), self.gate_proj(x)))  # noqa: F821

    assert code_hash(Same.__call__) == code_hash(llama.MLP.__call__)
    assert form_of(Same) == MLPForm() and form_of(Other) is None
    namespace: dict = {}
    exec("def f(self, x):\n    return x", namespace)
    assert code_hash(namespace["f"]) == ""


def test_a_block_whose_names_mean_something_else_is_left_alone(monkeypatch):
    monkeypatch.setattr(llama, "swiglu", lambda gate, x: gate + x)
    m = model()
    assert {d.site.kind for d in blocks(accelerate(m, POLICY))} <= {"attention"}


def test_owner_is_named_only_while_a_block_runs():
    m = model()
    accelerate(m, POLICY)
    run(m)
    assert scope.owner.get() == 0
