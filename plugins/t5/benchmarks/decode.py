"""t5 against 2-bit weights and ggml's ternary types: one linear layer, weights cold, all sides in turns in one process.

    python plugins/t5/benchmarks/decode.py --peers LLAMA_CPP_BUILD --rows 1,4 --json result.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from t5_ternary import choose, convert, modules, reference

from backend_core import Policy, core
from backend_core.bench.layers import Rotation

ROUNDS = 9


class Holder(nn.Module):
    """Layers as a model, for the core to accelerate; the embedding tells the dtype of activations."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(1, 8)
        self.embed.weight = self.embed.weight.astype(mx.float16)
        self.layers = layers


def layers(n: int, k: int, group: int, megabytes: int) -> dict[str, list[Any]]:
    """Accelerated layers with equal weights, so many that no cache holds them."""
    rng = np.random.default_rng(0)
    packed = np.resize(reference.pack(rng.integers(0, 3, (64, k)), group), (n, k // 64 * 13))
    first = modules.T5Linear(k, n, group_size=group)
    first.scales = mx.array((rng.random((n, k // group)) * 0.01 + 0.01).astype(np.float16))
    made: dict[str, list[Any]] = {"t5": [], "2-bit": []}
    for _ in range(max(2, (megabytes << 20) // packed.nbytes)):
        layer = modules.T5Linear(k, n, group_size=group)
        layer.weight, layer.scales = mx.array(packed), mx.array(np.array(first.scales))
        made["t5"].append(layer)
    for _ in range(max(2, (megabytes << 20) // (n * k // 4))):
        layer = choose.expanded(first)
        layer.weight = mx.array(convert.to_affine(packed, group))
        layer.scales = mx.array(np.array(first.scales))
        layer.biases = -layer.scales
        mx.eval(layer.parameters())
        made["2-bit"].append(layer)
    for name, several in made.items():
        holder = Holder(several)
        mx.eval(holder.parameters())
        report = core.accelerate(holder, Policy(deterministic=True, activations="float32", report="none"))
        print(f"{name}: {report.decisions[0].chosen}, {len(several)} copies", file=sys.stderr)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="4096x4096", help="output x input features")
    parser.add_argument("--group-size", type=int, default=128, choices=(64, 128))
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--weights-mb", type=int, default=512, help="weights of all copies together")
    parser.add_argument("--peers", type=Path, help="build directory of llama.cpp")
    parser.add_argument("--threads", type=int, default=2, help="threads of the peer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    n, k = map(int, options.shape.split("x"))
    made = layers(n, k, options.group_size, options.weights_mb)
    result: dict[str, Any] = {"command": sys.argv, "rows": {}}
    for rows in map(int, options.rows.split(",")):
        x = np.random.default_rng(rows).standard_normal((rows, k), dtype=np.float32)
        device_x = mx.array(x)[None]
        mx.eval(device_x)
        calls = 48 if rows <= 16 else 1
        runs = {name: Rotation(lambda layer, x: layer(x), some, device_x, calls).run for name, some in made.items()}
        closing = []
        if options.peers:
            from backend_core.bench.peer import Ggml
            from backend_core.bench.peer_work import best_mul_mat

            ggml = Ggml(options.peers, options.threads)
            for kind in ("tq1_0", "tq2_0"):
                values = np.random.default_rng(7).standard_normal((64, k), dtype=np.float32)
                copies = (options.weights_mb << 20) // ggml.matrix_bytes(kind, n, k)
                work, _ = best_mul_mat(ggml, kind, n, k, rows, copies, calls, ggml.quantized(kind, values), x)
                work.run()
                runs[kind] = work.run
                closing.append(work.close)
        for run in runs.values():
            run()
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(ROUNDS):
            for name in runs if i % 2 == 0 else reversed(runs):
                samples[name].append(runs[name]() * 1e6)
        cells = [f"{statistics.median(s):.0f} ({min(s):.0f}..{max(s):.0f})" for s in samples.values()]
        print(f"| {rows} | {' | '.join(cells)} |  <!-- {', '.join(samples)} -->", flush=True)
        result["rows"][rows] = samples
        for close in closing:
            close()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
