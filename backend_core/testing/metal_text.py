"""What mlx hands to Metal's compiler for a kernel, without Metal.

    from backend_core.testing.metal_text import metal_text
    metal_text("my_plugin.gpu_kernels:DENSE_QMV", {"n": 64, "k": 256, "dtype": "float16"},
               [((64, 256), "float16"), ((256,), "float16")], [((64,), "float16")])

While a function is exported mlx writes the text of its kernels, and never compiles it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

_CODE = """
import importlib, json, sys
import mlx.core as mx
from backend_core.simt import arguments
given = json.loads(sys.argv[1])
sys.path[:0] = given["path"]
module, _, name = given["kernel"].partition(":")
kernel = getattr(importlib.import_module(module), name)
launch = kernel.launch(**given["facts"])
shapes, dtypes = zip(*[(shape, getattr(mx, dtype)) for shape, dtype in given["outputs"]])
def f(*arrays):
    return kernel.metal()(inputs=list(arrays), output_shapes=list(shapes), output_dtypes=list(dtypes), verbose=True,
                          stream=mx.gpu, **arguments(launch, mx))
mx.export_function(sys.argv[2], f, *[mx.zeros(s, getattr(mx, d)) for s, d in given["inputs"]])
"""


def metal_text(
    kernel: str,
    facts: Mapping[str, Any],
    inputs: Sequence[tuple[Sequence[int], str]],
    outputs: Sequence[tuple[Sequence[int], str]],
) -> str:
    """The text for the launch of these facts.

    kernel
        Where the `SimtKernel` is: ``"module:NAME"``.
    inputs, outputs
        Shape and mlx's name of the dtype of each.

    Raises RuntimeError with what was said instead.
    """
    given = {"kernel": kernel, "facts": dict(facts), "inputs": inputs, "outputs": outputs, "path": sys.path}
    # A process of its own: the text goes to the standard output of C.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _CODE, json.dumps(given), f"{folder}/f.mlxfn"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "```" not in done.stdout:
        raise RuntimeError(f"mlx wrote no text: {done.stderr[-500:]}")
    return done.stdout.split("```")[1].lstrip("\n")
