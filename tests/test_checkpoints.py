"""Known quantization metadata passes, everything else is refused by name and place."""

from __future__ import annotations

import json

import pytest

from backend_core.checkpoints import UnknownQuantization, check_quantization

Q4 = {"group_size": 64, "bits": 4}
HADAMARD = {"bits": 2, "group_size": 128, "mode": "affine"}
PACK = {
    "model_type": "prism_hadamard_qwen35",
    "schema_version": 1,
    "tensor_namespace": "mlx-lm-text",
    "gdn_activation_layout": "grouped",
    "quantization": HADAMARD,
    "modules": [{"path": "model.layers.0.mlp.up_proj", "block": 1024}],
}

KNOWN = {
    "unquantized": {},
    "null": {"quantization": None},
    "affine": {"quantization": Q4},
    "affine with mode": {"quantization": {**Q4, "mode": "affine"}},
    "HF copy": {"quantization": Q4, "quantization_config": Q4},
    "1 bit": {"quantization": {"group_size": 128, "bits": 1}},
    "mxfp4": {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
    "nvfp4": {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}},
    "mxfp8": {"quantization": {"group_size": 32, "bits": 8, "mode": "mxfp8"}},
    "override dict": {"quantization": {**Q4, "model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 8}}},
    "override False": {"quantization": {**Q4, "lm_head": False, "model.layers.1.mlp.gate": False}},
    "override True": {"quantization": {**Q4, "model.embed_tokens": True}},
    "override of another mode": {
        "quantization": {
            "group_size": 32,
            "bits": 4,
            "mode": "mxfp4",
            "lm_head": {"group_size": 64, "bits": 8, "mode": "affine"},
        }
    },
    "override quantize_input": {"quantization": {**Q4, "lm_head": {**Q4, "quantize_input": False}}},
    "module named rotation": {"quantization": {**Q4, "vision.rotation_proj": {"bits": 8, "group_size": 64}}},
    "described": {"quantization": {**Q4, "comment": "no hadamard rotation here", "extra": None}},
    "rotation off": {"quantization": {**Q4, "hadamard": False}},
    "bitnet": {"quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}},
    "mxfp4 method": {"quantization_config": {"quant_method": "mxfp4"}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "in text_config": {"text_config": {"quantization_config": {"quant_method": "mxfp8"}}},
    "compressed-tensors": {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
    "modelopt": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    "awq": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}},
    "former method": {"quantization": Q4, "quantization_config": {"quant_method": "bitsandbytes"}},
    "Hadamard model type": PACK,
    "rope is no rotation": {"rotary_dim": 64, "rope_scaling": {"rope_type": "yarn"}, "quantization": Q4},
}


@pytest.mark.parametrize("config", KNOWN.values(), ids=KNOWN.keys())
def test_known(config, tmp_path):
    check_quantization(config, tmp_path)


# config, what is named, where it is said to be
UNKNOWN = {
    "mode": ({"quantization": {**Q4, "mode": "t5"}}, "mode = 't5'", "quantization"),
    "mode of one layer": (
        {"quantization": {**Q4, "model.layers.3.mlp.up_proj": {**Q4, "mode": "q8_0"}}},
        "mode = 'q8_0'",
        "quantization.model.layers.3.mlp.up_proj",
    ),
    "mode is no text": ({"quantization": {**Q4, "mode": ["affine"]}}, 'mode = ["affine"]', "quantization"),
    "rotation block": (
        {"quantization": {**HADAMARD, "rotation": {"type": "hadamard", "block": 1024}}},
        'rotation = {"type": "hadamard", "block": 1024}',
        "quantization",
    ),
    "hadamard flag": ({"quantization": {**HADAMARD, "hadamard": True}}, "hadamard = true", "quantization"),
    "hadamard size": (
        {"quantization": {**HADAMARD, "hadamard_block": 1024}},
        "hadamard_block = 1024",
        "quantization",
    ),
    "hadamard in the HF copy only": (
        {"quantization": HADAMARD, "quantization_config": {**HADAMARD, "rotation": "hadamard"}},
        "rotation = 'hadamard'",
        "quantization_config",
    ),
    "transform of compressed-tensors": (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
            }
        },
        "type = 'hadamard'",
        "quantization_config.transform_config.config_groups.R1",
    ),
    "top-level marker": (
        {"hadamard_config": {"block": 512}, "quantization": HADAMARD},
        "hadamard_config",
        "config.json",
    ),
    "pack under a plain type": (
        {**PACK, "model_type": "qwen3_5"},
        "tensor_namespace = 'mlx-lm-text'",
        "config.json",
    ),
    "unknown key": ({"quantization": {**Q4, "codebook": 16}}, "codebook = 16", "quantization"),
    "unknown flag": ({"quantization": {**Q4, "sym_packed": True}}, "sym_packed = true", "quantization"),
    "unknown layer key": (
        {"quantization": {**Q4, "lm_head": {**Q4, "permutation": [1, 0]}}},
        "permutation = [1, 0]",
        "quantization.lm_head",
    ),
    "no bits": ({"quantization": {"group_size": 64}}, "no bits", "quantization"),
    "bits is a text": ({"quantization": {"group_size": 64, "bits": "4"}}, "bits = '4'", "quantization"),
    "bits is a bool": ({"quantization": {"group_size": 64, "bits": True}}, "bits = true", "quantization"),
    "mxfp4 with affine's group": (
        {"quantization": {**Q4, "mode": "mxfp4"}},
        "mode = 'mxfp4' with bits 4 and group_size 64",
        "quantization",
    ),
    "not an object": ({"quantization": "4bit"}, "quantization = '4bit'", "config.json"),
    "method": (
        {"quantization_config": {"quant_method": "exl3"}},
        "quant_method = 'exl3'",
        "quantization_config",
    ),
    "method in text_config": (
        {"text_config": {"quantization_config": {"quant_method": "hqq"}}},
        "quant_method = 'hqq'",
        "text_config.quantization_config",
    ),
    "method beside MLX's": (
        {"quantization": Q4, "quantization_config": {"quant_method": "prism2"}},
        "quant_method = 'prism2'",
        "quantization_config",
    ),
    "method inside MLX's": (
        {"quantization": {**Q4, "quant_method": "t5"}},
        "quant_method = 't5'",
        "quantization",
    ),
    "no method": ({"quantization_config": {"bits": 4}}, "no quant_method", "quantization_config"),
    "method is a number": (
        {"quantization_config": {"quant_method": 4}},
        "quant_method = 4",
        "quantization_config",
    ),
    "format": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
        "format = 'int-quantized'",
        "quantization_config",
    ),
    "algorithm": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        "quant_algo = 'FP8'",
        "quantization_config",
    ),
    "awq with 8 bits": (
        {"quantization_config": {"quant_method": "awq", "bits": 8}},
        "bits = 8",
        "quantization_config",
    ),
    "config is a list": ({"quantization_config": [4]}, "[4]", "quantization_config"),
}


@pytest.mark.parametrize(("config", "what", "where"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown(config, what, where, tmp_path):
    with pytest.raises(UnknownQuantization) as caught:
        check_quantization(config, tmp_path)
    assert what in caught.value.what
    assert caught.value.where.endswith(where)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["hadamard.json", "rotation.json"])
def test_manifest_beside_a_plain_config(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UnknownQuantization, match=name):
        check_quantization({"model_type": "qwen3_5", "quantization": HADAMARD}, tmp_path)
    check_quantization(PACK, tmp_path)


def test_hf_quant_config_file(tmp_path):
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}))
    check_quantization({}, tmp_path)
    file.write_text(json.dumps({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8"}}))
    with pytest.raises(UnknownQuantization, match=r"quant_algo = 'W4A8' in .*hf_quant_config\.json"):
        check_quantization({}, tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UnknownQuantization, match="not JSON"):
        check_quantization({}, tmp_path)


def test_a_plugin_makes_a_method_known(tmp_path):
    for config in (
        {"quantization_config": {"quant_method": "t5", "rotation": "hadamard"}},
        {"quantization": {**Q4, "quant_method": "t5"}},
        {"quantization": {"mode": "t5", "group_size": 128}},
    ):
        with pytest.raises(UnknownQuantization):
            check_quantization(config, tmp_path)
        check_quantization(config, tmp_path, extra_methods=("t5",))


def test_an_uncommon_top_module_is_known_by_its_tensors(tmp_path):
    config = {"quantization": {**Q4, "prediction": False}}
    with pytest.raises(UnknownQuantization, match="prediction = false"):
        check_quantization(config, tmp_path)
    index = {"weight_map": {"prediction.weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_quantization(config, tmp_path)


def test_modes_are_those_of_mlx():
    """The table of fixed modes against mlx itself."""
    import mlx.core as mx

    from backend_core.checkpoints import MODES

    for mode, fixed in MODES.items():
        weight = mx.ones((4, 128))
        bits, group = fixed or (4, 64)
        assert mx.quantize(weight, group_size=group, bits=bits, mode=mode)[0].dtype == mx.uint32
        if fixed:
            with pytest.raises(ValueError):
                mx.quantize(weight, group_size=64, bits=bits, mode=mode)
