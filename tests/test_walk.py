"""Walking models: every linear site once, with the facts that mlx itself shows."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from backend_core import install, walk
from backend_core.probes_registry import probe_for
from backend_core.report import Report
from backend_core.walk import find_linears, find_moe, find_ops

#: Paths of one layer's linear sites, per family, in the order in which the walk must give them.
ATTENTION = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]
MLP = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
EXPERTS = ["mlp.switch_mlp.down_proj", "mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj"]
SHARED = ["mlp.shared_experts.down_proj", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"]
MLA = ["self_attn.embed_q", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj", "self_attn.q_a_proj",
       "self_attn.q_b_proj", "self_attn.unembed_out"]  # fmt: skip


def layers(prefix, *per_layer):
    return [f"{prefix}.{i}.{name}" for i, names in enumerate(per_layer) for name in sorted(names)]


LAYERS = layers("model.layers", ATTENTION + MLP, ATTENTION + MLP)
EXPECTED = {
    "llama": ["model.embed_tokens", *LAYERS],
    "qwen3": ["lm_head", *LAYERS],
    "gemma3": ["lm_head", *layers("model.layers", *[ATTENTION + MLP] * 3)],
    "qwen3_moe": ["lm_head", *layers("model.layers", *[ATTENTION + EXPERTS + ["mlp.gate"]] * 2)],
    "deepseek_v3": ["lm_head", *layers("model.layers", MLA + MLP, MLA + EXPERTS + SHARED)],
    "mamba2": ["backbone.embeddings", *layers("backbone.layers", *[["mixer.in_proj", "mixer.out_proj"]] * 2)],
}


@pytest.fixture(scope="module")
def models():
    built: dict = {}

    def build(name, **options):
        key = (name, tuple(sorted(options.items())))
        if key not in built:
            built[key] = tiny_models.build(name, **options)
        return built[key]

    return build


def paths(model, **options):
    return [f.site.path for f in find_linears(model, **options)]


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("name", EXPECTED)
def test_every_linear_of_a_family_in_natural_order(models, name, bits):
    found = find_linears(models(name, bits=bits))
    assert [f.site.path for f in found] == EXPECTED[name]
    by_path = dict(models(name, bits=bits).named_modules())
    for f in found:
        assert f.module is by_path[f.site.path]
        assert f.site.aliases == () and not f.site.in_lora
        assert (f.site.host, f.site.device) == ("mlx_lm", "cpu")
        assert f.site.model_type == tiny_models.CONFIGS[name]["model_type"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "mamba2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_is_a_site_only_where_it_is_tied(name, tied):
    model = tiny_models.build(name, tie_word_embeddings=tied)
    kinds = {f.site.path: f.site.kind for f in find_linears(model)}
    embeddings = [p for p, k in kinds.items() if k == "embedding"]
    assert len(embeddings) == int(tied)
    assert ("lm_head" in kinds) is not tied


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_created_and_left_unused_hides_nothing(tied):
    from mlx_lm.models import helium

    model = helium.Model(
        helium.ModelArgs(
            hidden_size=64, num_hidden_layers=1, intermediate_size=64, num_attention_heads=2,
            num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=96, attention_bias=False, head_dim=32,
            max_position_embeddings=64, mlp_bias=False, model_type="helium", rope_theta=1e4,
            tie_word_embeddings=tied,
        )
    )  # fmt: skip
    assert ("model.embed_tokens" in paths(model)) is tied


def test_gemma3_ties_when_the_checkpoint_has_no_head():
    model = tiny_models.build("gemma3")
    assert "lm_head" in paths(model)
    from mlx.utils import tree_flatten

    weights = {k: v for k, v in tree_flatten(model.parameters()) if not k.startswith("lm_head")}
    model.load_weights(list(model.sanitize(weights).items()))
    assert [p for p in paths(model) if "embed" in p or "lm_head" in p] == ["model.embed_tokens"]


def test_kinds_and_shapes(models):
    sites = {f.site.path: f.site for f in find_linears(models("deepseek_v3", bits=4))}
    multi = sites["model.layers.1.self_attn.embed_q"]
    assert (multi.kind, multi.batch, multi.n, multi.k) == ("multi", 4, 64, 32)
    switch = sites["model.layers.1.mlp.switch_mlp.down_proj"]
    assert (switch.kind, switch.batch, switch.n, switch.k) == ("switch", 4, 128, 64)
    head = sites["lm_head"]
    assert (head.kind, head.batch, head.n, head.k) == ("linear", 1, tiny_models.VOCAB, 128)
    for site in sites.values():
        assert (site.mode, site.bits, site.group_size) == ("affine", 4, 32)
        assert (site.weight_dtype, site.scales_dtype) == ("uint32", "float32")


def test_one_signature_for_equal_layers(models):
    found = find_linears(models("llama", bits=4))
    up = {f.site.signature for f in found if f.site.path.endswith(("up_proj", "gate_proj"))}
    assert len(up) == 1
    assert len({f.site.signature for f in found}) == 6  # embedding, q, k=v, o, gate=up, down


def test_ten_comes_after_two():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)])
    assert paths(model) == [f"layers.{i}" for i in range(12)]


@given(st.lists(st.lists(st.one_of(st.integers(0, 30), st.sampled_from("abc")), min_size=1, max_size=3), max_size=8))
def test_natural_order_is_total_and_numeric(parts):
    names = [".".join(map(str, p)) for p in parts]
    ordered = sorted(names, key=walk.natural)
    assert sorted(ordered) == sorted(names)
    numbers = [int(n) for n in ordered if n.isdigit()]
    assert numbers == sorted(numbers)


# Facts of one layer, checked against what the layer does


CASES = [
    ("linear", lambda n, k: nn.Linear(k, n, bias=False)),
    ("linear with bias", lambda n, k: nn.Linear(k, n)),
    ("embedding", lambda n, k: nn.Embedding(n, k)),
]
QUANTIZATIONS = [None, ("affine", 4, 64), ("affine", 1, 128), ("affine", 3, 32), ("mxfp4", 4, 32),
                 ("nvfp4", 4, 16), ("mxfp8", 8, 32)]  # fmt: skip
DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
@pytest.mark.parametrize("how", QUANTIZATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", ["", *DTYPES])
def test_facts_predict_the_layer(case, how, dtype, x_dtype):
    kind, make = case[0].split()[0], case[1]
    layer = make(24, 128)
    layer.set_dtype(getattr(mx, dtype))
    if how is not None:
        layer = layer.to_quantized(group_size=how[2], bits=how[1], mode=how[0])
    facts = walk.linear_facts(layer, kind, x_dtype)
    assert (facts["n"], facts["k"], facts["batch"]) == (24, 128, 1)
    assert (facts["mode"], facts["bits"], facts["group_size"]) == (how or ("dense", 0, 0))
    assert facts["has_bias"] is ("bias" in layer)
    assert facts["weight_dtype"] == ("uint32" if how else dtype)
    if how is None:
        assert facts["scales_dtype"] == ""
    else:
        assert facts["scales_dtype"] == (dtype if how[0] == "affine" else "uint8")
    if x_dtype:
        assert facts["x_dtype"] == x_dtype
    x = mx.zeros((2, 128), getattr(mx, facts["x_dtype"]))
    y = layer.as_linear(x) if kind == "embedding" else layer(x)
    assert walk.dtype_name(y.dtype) == facts["out_dtype"]
    assert y.shape == (2, 24)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_facts_predict_switch_and_multi_layers(quantize, dtype):
    switch, multi = SwitchLinear(64, 32, 3, bias=True), MultiLinear(64, 32, 3)
    for layer in (switch, multi):
        layer.set_dtype(getattr(mx, dtype))
    if quantize:
        switch, multi = switch.to_quantized(32, 4), multi.to_quantized(32, 4)
        assert type(switch) is QuantizedSwitchLinear and type(multi) is QuantizedMultiLinear
    for layer, kind, has_bias in ((switch, "switch", True), (multi, "multi", False)):
        facts = walk.linear_facts(layer, kind, "float32")
        assert (facts["n"], facts["k"], facts["batch"], facts["has_bias"]) == (32, 64, 3, has_bias)
        assert facts["mode"] == ("affine" if quantize else "dense")
        assert facts["out_dtype"] == "float32"


def test_no_matrix_no_site():
    layer = nn.Linear(8, 4)
    del layer["weight"]
    assert walk.linear_facts(layer, "linear") is None
    model = nn.Sequential(layer, nn.Linear(4, 2))
    assert paths(model) == ["layers.1"]
    # A matrix with a leading axis is not what nn.Linear multiplies with.
    stacked = nn.Linear(8, 4)
    stacked.weight = mx.zeros((2, 4, 8))
    assert walk.linear_facts(stacked, "linear") is None
    assert walk.linear_facts(SwitchLinear(8, 4, 2), "linear") is None


def test_the_activations_policy_reaches_every_site(models):
    model = models("llama", bits=4, dtype="float16")
    assert {f.site.x_dtype for f in find_linears(model)} == {"float16"}
    wide = find_linears(model, "float32")
    assert {(f.site.x_dtype, f.site.out_dtype, f.site.scales_dtype) for f in wide} == {
        ("float32", "float32", "float16")
    }


def test_a_subclass_is_not_a_site():
    class Own(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 2

    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4))
    assert paths(model) == ["layers.1"]


def test_a_bare_layer_is_a_model_too():
    layer = nn.Linear(4, 4)
    [found] = find_linears(layer)
    assert found.module is layer and found.site.path == "" and found.site.host == ""


def test_a_model_without_linears():
    assert find_linears(nn.Sequential(nn.ReLU(), nn.RMSNorm(4))) == []


# Sharing


def test_a_module_held_twice_is_one_site_with_aliases():
    shared = nn.Linear(4, 4)
    model = nn.Module()
    model.zed, model.late, model.own = shared, {"b": shared, "a": [nn.Identity(), shared]}, nn.Linear(4, 4)
    found = find_linears(model)
    assert [(f.site.path, f.site.aliases) for f in found] == [
        ("late.a.1", ("late.b", "zed")),
        ("own", ()),
    ]
    assert found[0].module is shared


def test_shared_layers_are_found_whatever_holds_them_first():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], shared, *[nn.Linear(4, 4) for _ in range(7)], shared)
    found = {f.site.path: f.site.aliases for f in find_linears(model)}
    assert found["layers.3"] == ("layers.11",)
    assert "layers.11" not in found and len(found) == 11


# Adapters


def adapted(name, keys=None, **options):
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = tiny_models.build(name, **options)
    linear_to_lora_layers(model, 1, {"rank": 2, "scale": 1.0, "dropout": 0.0, **({"keys": keys} if keys else {})})
    return model


@pytest.mark.parametrize("bits", [0, 4])
def test_linears_under_lora_are_sites(bits):
    model = adapted("llama", bits=bits)
    sites = {f.site.path: f.site for f in find_linears(model)}
    inside = [p for p, s in sites.items() if s.in_lora]
    assert inside == [p for p in sites if p.endswith(".linear")]
    assert "model.layers.1.self_attn.q_proj.linear" in inside
    assert not any(p.startswith("model.layers.0.") for p in inside)
    assert len(sites) == len(EXPECTED["llama"])
    # Adapters change where a layer is, not what it is.
    assert sites["model.layers.1.self_attn.q_proj.linear"].signature == (
        sites["model.layers.0.self_attn.q_proj"].signature
    )


def test_experts_under_lora_are_sites():
    model = adapted("qwen3_moe", ["mlp.switch_mlp.up_proj"], bits=4)
    [site] = [f.site for f in find_linears(model) if f.site.in_lora]
    assert (site.path, site.kind) == ("model.layers.1.mlp.switch_mlp.up_proj.linear", "switch")


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapted_embedding_is_a_site_only_where_it_is_tied(tied):
    from mlx_lm.tuner.lora import LoRAEmbedding

    model = tiny_models.build("llama", tie_word_embeddings=tied)
    model.model.embed_tokens = LoRAEmbedding.from_base(model.model.embed_tokens, r=2)
    sites = {f.site.path: f.site for f in find_linears(model) if f.site.kind == "embedding"}
    assert list(sites) == (["model.embed_tokens.embedding"] if tied else [])
    assert all(s.in_lora for s in sites.values())


# Accelerated models


def test_accelerated_layers_are_found_as_what_they_were(models):
    model = tiny_models.build("llama", bits=4)
    before = find_linears(model)
    for f in before:
        install.install(f.module, install.Slot(f.module, Report(), probe_for(f.site)))
    assert all(type(f.module) is not walk.stock_class(f.module) for f in before)
    assert [f.site for f in find_linears(model)] == [f.site for f in before]
    assert walk.activations_dtype(model) == "float32"
    for f in before:
        assert install.uninstall(f.module)


# The first dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["", "affine", "mxfp4", "nvfp4", "mxfp8"])
def test_activations_dtype_is_what_the_embedding_hands_out(dtype, mode):
    embedding = nn.Embedding(8, 64)
    embedding.set_dtype(getattr(mx, dtype))
    if mode:
        embedding = embedding.to_quantized(mode=mode)
    want = walk.dtype_name(embedding(mx.array([1])).dtype)
    assert walk.activations_dtype(nn.Sequential(embedding)) == want


def test_no_embedding_no_dtype():
    assert walk.activations_dtype(nn.Sequential(nn.Linear(2, 2))) == ""


def test_model_type_comes_from_wherever_it_stands():
    class Config:
        model_type = "toy"

    bare, by_args, by_config, odd = nn.Module(), nn.Module(), nn.Module(), nn.Module()
    by_args.args, by_config.config, odd.model_type = Config(), Config(), 3
    assert [walk.model_type_of(m) for m in (bare, by_args, by_config, odd)] == ["", "toy", "toy", ""]


# Experts


@pytest.mark.parametrize("bits", [0, 4])
def test_moe_blocks(models, bits):
    found = find_moe(models("qwen3_moe", bits=bits))
    assert [f.site.path for f in found] == ["model.layers.0.mlp.switch_mlp", "model.layers.1.mlp.switch_mlp"]
    site = found[0].site
    assert (site.d_model, site.d_hidden, site.n_experts, site.gated) == (128, 96, 6, True)
    assert (site.mode, site.bits, site.uniform, site.has_bias) == (("affine", 4) if bits else ("dense", 0)) + (
        True,
        False,
    )
    assert site.activation == "SwiGLU" and site.x_dtype == "float32"
    assert len({f.site.signature for f in found}) == 1
    assert find_moe(models("llama")) == []


def test_moe_blocks_without_gate_and_mixed_ones():
    mlp, glu = SwitchMLP(32, 64, 2, bias=True), SwitchGLU(32, 64, 2)
    glu.up_proj = glu.up_proj.to_quantized(32, 4)
    model = nn.Module()
    model.b, model.a, model.again = mlp, glu, mlp
    found = find_moe(model)
    assert [f.site.path for f in found] == ["a", "again"]  # the shared block once
    a, again = (f.site for f in found)
    assert a.gated and not a.uniform and a.mode == "dense"
    assert not again.gated and again.uniform and again.has_bias and again.activation == "GELU"
    assert (again.d_model, again.d_hidden, again.n_experts) == (32, 64, 2)


# Ops


def test_norms_and_rope(models):
    sites = {f.site.path: f.site for f in find_ops(models("llama", dtype="float16"))}
    norm = sites["model.layers.1.input_layernorm"]
    assert (norm.op, norm.dims, norm.eps, norm.weight_dtype, norm.x_dtype) == (
        "rms_norm", 96, pytest.approx(1e-5), "float16", "float16",
    )  # fmt: skip
    rope = sites["model.layers.0.self_attn.rope"]
    assert (rope.op, rope.rope_dims, rope.rope_base, rope.rope_scale, rope.rope_traditional) == (
        "rope", 32, 10000.0, 1.0, False,
    )  # fmt: skip
    assert list(sites) == sorted(sites) and len(sites) == 2 * 3 + 1
    assert {s.x_dtype for s in (f.site for f in find_ops(models("llama"), "bfloat16"))} == {"bfloat16"}


def test_layer_norm_without_weight_and_shared_norms():
    model = nn.Module()
    model.plain, model.norm = nn.LayerNorm(16, affine=False), nn.LayerNorm(16, eps=1e-3)
    model.same = model.norm
    found = [(f.site.path, f.site.op, f.site.dims, f.site.eps, f.site.weight_dtype) for f in find_ops(model)]
    assert found == [
        ("norm", "layer_norm", 16, pytest.approx(1e-3), "float32"),
    ]


def test_gemma_norms_are_sites_of_their_own(models):
    """gemma3's own RMSNorm adds one to its weight; it is known by its code."""
    norms = [f.site for f in find_ops(models("gemma3")) if f.site.op == "rms_norm"]
    assert norms and {s.variant for s in norms} == {"one_plus"}
    assert {s.variant for s in (f.site for f in find_ops(models("llama"))) if s.op == "rms_norm"} == {""}
