"""The converted demo model is lossless and its tokenizer is right."""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from demo_marks import marked

from backend_core import paths
from backend_core.demo import gguf, model, run

# --- an independent reader of GGUF, written from the format's description -----------------------------------

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Gguf:
    """Metadata and raw tensor blocks of a GGUF file, by numpy alone."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.at = 0
        assert self.data[:4] == b"GGUF"
        self.at = 4
        _, tensors, pairs = self.take("I"), self.take("Q"), self.take("Q")
        self.metadata = {self.text(): self.value(self.take("I")) for _ in range(pairs)}
        infos = []
        for _ in range(tensors):
            name = self.text()
            shape = [self.take("Q") for _ in range(self.take("I"))][::-1]
            infos.append((name, shape, self.take("I"), self.take("Q")))
        start = -(-self.at // 32) * 32
        self.tensors = {name: (shape, kind, start + offset) for name, shape, kind, offset in infos}

    def take(self, kind: str):
        value = struct.unpack_from(f"<{kind}", self.data, self.at)[0]
        self.at += struct.calcsize(f"<{kind}")
        return value

    def text(self) -> str:
        length = self.take("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int):
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.take("I"), self.take("Q")
            return [self.value(inner) for _ in range(count)]
        return self.take(_SCALARS[kind])

    def blocks(self, name: str):
        """(codes (N, K) as int16, d (N, K/32), m (N, K/32)) with value = d * code + m, or float32 values."""
        shape, kind, offset = self.tensors[name]
        count = int(np.prod(shape))
        if kind == 0:
            return np.frombuffer(self.data, "<f4", count, offset).reshape(shape)
        layout = {
            3: np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),
            8: np.dtype([("d", "<f2"), ("q", "i1", 32)]),
        }[kind]
        raw = np.frombuffer(self.data, layout, count // 32, offset).reshape(*shape[:-1], shape[-1] // 32)
        if kind == 3:
            codes = np.concatenate([raw["q"] & 15, raw["q"] >> 4], axis=-1).astype(np.int16)
            return codes.reshape(shape), raw["d"].astype(np.float64), raw["m"].astype(np.float64)
        return raw["q"].astype(np.int16).reshape(shape), raw["d"].astype(np.float64), np.zeros(raw.shape)


@pytest.fixture(scope="module")
def cache():
    """A cache directory of this module, removed at its end (it holds 210 MB)."""
    before = os.environ.get(paths.CACHE_ENV)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[paths.CACHE_ENV] = folder
        yield Path(folder)
    os.environ.pop(paths.CACHE_ENV)
    if before is not None:
        os.environ[paths.CACHE_ENV] = before


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def converted(request, cache):
    return request.param, model.demo_model_dir(request.param)


@pytest.fixture(scope="module")
def fp32(cache):
    return model.demo_model_dir("fp32")


@pytest.fixture(scope="module")
def oracle():
    return Gguf(model.find_source().path)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of a little-endian bit stream in uint32 words, (N, K)."""
    per = 32 // bits
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).reshape(words.shape[0], -1).astype(np.int16)


PAIRS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def interleave(x: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary rows from mlx-lm's: the inverse of what the converter does."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)


@marked
def test_every_weight_is_the_files_own(converted, oracle):
    from safetensors.numpy import load_file

    scales, directory = converted
    ours = load_file(directory / "model.safetensors")
    used = set()
    for name, (shape, kind, _) in oracle.tensors.items():
        parts = name.split(".")
        if parts[0] == "blk":
            path = f"model.layers.{parts[1]}.{PAIRS[parts[2]]}"
        else:
            path = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
        if kind == 0:
            assert ours[f"{path}.weight"].dtype == {"fp32": np.float32, "fp16": np.float16}[scales]
            assert np.array_equal(ours[f"{path}.weight"].astype(np.float32), oracle.blocks(name)), name
            used.add(f"{path}.weight")
            continue
        codes, d, m = oracle.blocks(name)
        bits = {3: 4, 8: 8}[kind]
        mine = [unpack(ours[f"{path}.weight"], bits)]
        mine += [ours[f"{path}.{part}"].astype(np.float64) for part in ("scales", "biases")]
        if path.endswith(("q_proj", "k_proj")):
            mine = [interleave(x, 9 if path.endswith("q_proj") else 3) for x in mine]
        assert mine[0].shape == tuple(shape)
        # value = d * code + m. Q8_0's signed codes are mlx's minus 128, so that its bias is -128 d.
        zero = 128 if bits == 8 else 0
        assert np.array_equal(mine[0] - zero, codes), name
        assert np.array_equal(mine[1], d), name
        assert np.array_equal(mine[2] + zero * d, m), name
        used |= {f"{path}.{part}" for part in ("weight", "scales", "biases")}
    assert used == set(ours)
    assert len(oracle.tensors) == 272


@marked
def test_mlx_dequantises_to_the_files_values(fp32, oracle):
    import mlx.core as mx

    ours = mx.load(str(fp32 / "model.safetensors"))
    cases = [
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj", 4),
        ("token_embd.weight", "model.embed_tokens", 8),
    ]
    for name, path, bits in cases:
        triple = [ours[f"{path}.{part}"][:512] for part in ("weight", "scales", "biases")]
        got = np.array(mx.dequantize(*triple, group_size=32, bits=bits), dtype=np.float64)
        codes, d, m = (x[:512] for x in oracle.blocks(name))
        want = codes * np.repeat(d, 32, axis=1) + np.repeat(m, 32, axis=1)
        # float32 arithmetic on numbers as large as the bias: one unit in its last place.
        assert np.abs(got - want).max() <= 2.0**-23 * np.abs(np.array(triple[2])).max()


@marked
def test_config(converted):
    _, directory = converted
    config = json.loads((directory / "config.json").read_text())
    eight = {"group_size": 32, "bits": 8, "mode": "affine"}
    assert config["quantization"] == {
        "group_size": 32, "bits": 4, "mode": "affine", "model.embed_tokens": eight,
    }  # fmt: skip
    facts = {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0, "max_position_embeddings": 8192, "vocab_size": 49152,
        "tie_word_embeddings": True,
    }  # fmt: skip
    assert {key: config[key] for key in facts} == facts
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "do_sample": False}


TEXTS = [
    "Hello world", "It's 2024, and I've 1,234.5 reasons!\n\n\tYes.", "  two  spaces ", "naïve café ½ 東京 🙂",
    "", "x = [i**2 for i in range(10)]\n", "don't DON'T we'll", "<|im_start|>user\nhi<|im_end|>\n",
    "٣٤ १२", "\r\n \n",
]  # fmt: skip


def reference_encode(text: str, oracle: Gguf) -> list[int]:
    """GPT-2 byte-level BPE with llama.cpp's pattern for the smollm pre-tokenizer, straightforwardly."""
    regex = pytest.importorskip("regex", reason="the package regex is not installed")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    ids = {t: i for i, t in enumerate(oracle.metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(p.split(" ")): i for i, p in enumerate(oracle.metadata["tokenizer.ggml.merges"])}
    special = [t for t, kind in zip(ids, oracle.metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    out = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            out.append(ids[part])
            continue
        for piece in filter(None, regex.split(r"(\p{N})", part)):
            pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
            for word in regex.findall(pattern, piece):
                symbols = [letters[b] for b in word.encode()]
                while len(symbols) > 1:
                    rank, i = min((ranks.get(p, 1 << 30), i) for i, p in enumerate(pairwise(symbols)))
                    if rank == 1 << 30:
                        break
                    symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
                out += [ids[s] for s in symbols]
    return out


@marked
def test_tokenizer(fp32, oracle):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(fp32 / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("Hello world").ids == [19556, 905]
    assert tokenizer.encode("1234").ids == [33, 34, 35, 36]
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert ids == reference_encode(text, oracle), text


@marked
def test_tokenizer_as_transformers_reads_it(fp32):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(fp32))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(tokenizer.encode(text)) == 31
    long = tokenizer.apply_chat_template(
        [{"role": "user", "content": run.LONG_PROMPT}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert len(long) == 128
    assert len(tokenizer.encode(run.SHORT_PROMPT)) == 4
    assert tokenizer.decode(tokenizer.encode("a , b . c's"), clean_up_tokenization_spaces=None) == "a , b . c's"


def test_rotary_rows_of_two_small_heads():
    assert gguf.rotary_rows(8, 2) == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf.rotary_rows(6, 1) == [0, 2, 4, 1, 3, 5]


def test_names_and_refusals(tmp_path):
    assert gguf.hf_name("blk.12.attn_k.scales") == "model.layers.12.self_attn.k_proj.scales"
    assert gguf.hf_name("output.weight") == "lm_head.weight"
    for name in ("blk.0.ffn_gate_exps.weight", "rope_freqs.weight", "blk.x.attn_q.weight"):
        with pytest.raises(gguf.GGUFError, match="no counterpart"):
            gguf.hf_name(name)
    with pytest.raises(gguf.GGUFError, match="'llama-bpe' is unknown"):
        gguf.tokenizer_files({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"})
    with pytest.raises(gguf.GGUFError, match="architecture 'gemma'"):
        gguf.config({"general.architecture": "gemma"}, {"a": 4}, tied=True)
    (tmp_path / "x.gguf").write_bytes(b"GGUFgarbage")
    with pytest.raises(gguf.GGUFError, match=r"x\.gguf cannot be read"):
        gguf.read(tmp_path / "x.gguf")


@marked
def test_stock_command_line_on_the_real_model(fp32):
    pieces = []
    words = run.command(fp32, run.SHORT_PROMPT, 3, template=False)
    figures = run.run_child(words, on_output=lambda: pieces.append(1))
    assert (figures.prompt_tokens, figures.new_tokens) == (4, 3)
    assert figures.text == ", but the"
    assert figures.prompt_tps > 0 and figures.new_tps > 0
    assert pieces
