"""Pieces of work as ggml graphs: many calls per run, over copies of weights that no cache holds."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .peer import Arena, Ggml, PeerError

#: The most bytes of results that graphs may hold.
_RESULT_BYTES = 256 << 20


class Work:
    """Graphs that run in turn; `calls` calls in each.

    make
        (arena, copy) -> result tensor of one call on copy number `copy`.
    """

    def __init__(self, ggml: Ggml, make: Callable[[Arena, int], Any], copies: int, calls: int,
                 inputs: Callable[[Arena], None] | None = None) -> None:  # fmt: skip
        self.ggml, self.calls = ggml, calls
        graphs = max(1, copies // calls)
        self._arena = Arena(ggml, 16 + 8 * graphs * calls, 0)
        self._graph_arenas = []
        if inputs is not None:
            inputs(self._arena)
        self.results = [[make(self._arena, g * calls + c) for c in range(calls)] for g in range(graphs)]
        self._arena.allocate(ggml.layouts["plain"])
        self._plans = []
        for results in self.results:
            holder = Arena(ggml, 0, 8 * calls)
            graph = ggml.new_graph_custom(holder.context, 8 * calls, False)
            for result in results:
                ggml.build_forward_expand(graph, result)
            self._graph_arenas.append(holder)
            self._plans.append(ggml.backend_graph_plan_create(ggml.backend, graph))
        self._next = 0

    def fill(self, tensor: Any, values: np.ndarray) -> None:
        """Set an input."""
        self._arena.fill(tensor, np.ascontiguousarray(values).tobytes())

    def run(self) -> float:
        """Seconds per call of the next graph."""
        plan = self._plans[self._next % len(self._plans)]
        self._next += 1
        self.ggml.wake()
        begin = time.perf_counter()
        status = self.ggml.backend_graph_plan_compute(self.ggml.backend, plan)
        seconds = time.perf_counter() - begin
        self.ggml.rest()
        if status != 0:
            raise PeerError(f"ggml could not compute a graph (status {status})")
        return seconds / self.calls

    def value(self, graph: int = 0, call: int = 0) -> np.ndarray:
        """The result of one call of a graph that has run, flat."""
        return self._arena.read(self.results[graph][call])

    def close(self) -> None:
        for plan in self._plans:
            self.ggml.backend_graph_plan_free(self.ggml.backend, plan)
        for arena in (*self._graph_arenas, self._arena):
            arena.close()
        self._plans = []


class MulMat:
    """y = W x for `copies` copies of an (n, k) matrix of a type, `rows` rows at once.

    pattern
        A few quantized rows of the matrix, repeated down its length (their values do not matter, their bytes do).
    layout
        A key of ``ggml.layouts``.
    """

    def __init__(self, ggml: Ggml, kind: str, layout: str, n: int, k: int, rows: int, copies: int, calls: int,
                 pattern: bytes, x: np.ndarray) -> None:  # fmt: skip
        self.ggml = ggml
        copies = max(1, min(copies, _RESULT_BYTES // (4 * rows * n)))
        calls = max(1, min(calls, copies))
        self.weights = Arena(ggml, copies)
        matrices = [self.weights.tensor(kind, k, n) for _ in range(copies)]
        self.weights.allocate(ggml.layouts[layout], weights=True)
        data = (pattern * -(-ggml.matrix_bytes(kind, n, k) // len(pattern)))[: ggml.matrix_bytes(kind, n, k)]
        for matrix in matrices:
            self.weights.fill(matrix, data)
        xs: list[Any] = []
        self.work = Work(ggml, lambda arena, i: ggml.mul_mat(arena.context, matrices[i], xs[0]), copies, calls,
                         lambda arena: xs.append(arena.tensor("f32", k, rows)))  # fmt: skip
        self.work.fill(xs[0], x.astype(np.float32))

    def run(self) -> float:
        return self.work.run()

    def close(self) -> None:
        self.work.close()
        self.weights.close()


def layouts_for(ggml: Ggml, kind: str, n: int, k: int, rows: int) -> list[str]:
    """Layouts that have a kernel for this product, plain memory first."""
    found = ["plain"]
    for name, layout in ggml.layouts.items():
        if name == "plain":
            continue
        weights, nodes = Arena(ggml, 1), Arena(ggml, 4)
        try:
            matrix = weights.tensor(kind, k, n)
            weights.allocate(layout, weights=True)
            node = ggml.mul_mat(nodes.context, matrix, nodes.tensor("f32", k, rows))
            has_kernel = ggml.backend_dev_supports_op(ggml.device, node)
            if has_kernel and survives(ggml.directory, kind, name, rows > 1):
                found.append(name)
        except PeerError:
            continue  # no memory in this layout
        finally:
            weights.close()
            nodes.close()
    return found


@functools.cache
def survives(directory: Path, kind: str, layout: str, several_rows: bool) -> bool:
    """False if a product in this layout kills the process.

    Tried in another process: compilers of some age miscompile the set-up of AMX tiles, and the build then dies of
    an illegal instruction at the first product of several rows.
    """
    code = (
        "import sys\nfrom pathlib import Path\nfrom backend_core.bench import peer_work\n"
        "peer_work.try_layout(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))"
    )
    command = [sys.executable, "-c", code, str(directory), kind, layout, "64" if several_rows else "1"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode < 0:
        print(
            f"ggml's {layout} layout of {kind} is left out: this build dies of signal {-done.returncode} there",
            file=sys.stderr,
        )
    return done.returncode == 0


def try_layout(directory: Path, kind: str, layout: str, rows: int) -> None:
    """One small product, for :func:`survives`."""
    ggml = Ggml(directory, 1)
    x = np.ones((rows, 512), np.float32)
    MulMat(ggml, kind, layout, 256, 512, rows, 1, 1, ggml.quantized(kind, np.ones((256, 512), np.float32)), x).run()


def best_mul_mat(ggml: Ggml, kind: str, n: int, k: int, rows: int, copies: int, calls: int, pattern: bytes,
                 x: np.ndarray, trial: Sequence[str] = ()) -> tuple[MulMat, str]:  # fmt: skip
    """(the fastest layout's work, its name): each is tried on a few copies first."""
    names = list(trial) or layouts_for(ggml, kind, n, k, rows)
    if len(names) > 1:
        times = {}
        few = max(1, min(copies, 8, (128 << 20) // ggml.matrix_bytes(kind, n, k)))
        for name in names:
            work = MulMat(ggml, kind, name, n, k, rows, few, few, pattern, x)
            work.run()
            times[name] = min(work.run() for _ in range(3))
            work.close()
        names.sort(key=lambda name: times[name])
    return MulMat(ggml, kind, names[0], n, k, rows, copies, calls, pattern, x), names[0]
