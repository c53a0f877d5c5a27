"""The kernels that plugins announce: names, files and contracts, never code."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .offers import EXACTNESS
from .sites import DEVICES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .simt import SimtKernel
    from .testing.lab.cases import Case


@dataclass(frozen=True)
class KernelInfo:
    """One kernel: device code with one numeric contract.

    name
        Unique within the plugin.
    device
        ``"cpu"``, ``"metal"`` or ``"cuda"``.
    path
        The file that holds it: a shared library for the CPU, source text otherwise.
    symbol
        The C function, for the CPU.
    exactness
        ``"bitwise"``, ``"rounding"`` or ``"lossy"``.
    """

    name: str
    device: str
    path: Path
    symbol: str = ""
    exactness: str = "rounding"

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"kernel {self.name!r}: device {self.device!r} is not one of {DEVICES}")
        if self.exactness not in EXACTNESS:
            raise ValueError(f"kernel {self.name!r}: exactness {self.exactness!r} is not one of {EXACTNESS}")


class Registry:
    """What `register_kernels` writes into; one per plugin."""

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self.kernels: list[KernelInfo] = []
        self.simt_kernels: list[SimtKernel] = []
        self.cases: dict[str, Callable[[], Iterable[Case]]] = {}

    def cpu(self, *, name: str, library: object, symbol: str, exactness: str = "rounding") -> None:
        """Announce a C function `symbol` in the shared library at path `library`."""
        if not symbol:
            raise ValueError(f"kernel {name!r}: symbol must name a C function")
        self._add(KernelInfo(name, "cpu", Path(str(library)), symbol, exactness))

    def source(self, *, name: str, device: str, path: object, exactness: str = "rounding") -> None:
        """Announce Metal or CUDA source text in the file at `path`."""
        if device == "cpu":
            raise ValueError(f"kernel {name!r}: a CPU kernel is a compiled library; announce it with cpu()")
        self._add(KernelInfo(name, device, Path(str(path)), "", exactness))

    def simt(self, kernel: SimtKernel, *, exactness: str = "rounding",
             cases: Callable[[], Iterable[Case]] | None = None) -> None:  # fmt: skip
        """Announce a kernel for Metal and CUDA from one source file.

        cases: makes what ``python -m backend_core.testing.lab report`` runs; called for nothing else.
        """
        for device in ("metal", "cuda"):
            self._add(KernelInfo(kernel.name, device, Path(str(kernel.source)), "", exactness))
        self.simt_kernels.append(kernel)
        if cases is not None:
            self.cases[kernel.name] = cases

    def _add(self, info: KernelInfo) -> None:
        if any(k.name == info.name and k.device == info.device for k in self.kernels):
            raise ValueError(f"kernel {info.name!r} is registered twice for {info.device}")
        if not info.path.is_file():
            raise FileNotFoundError(
                f"kernel {info.name!r}: {info.path} does not exist. Was the plugin built without a compiler? "
                f"Reinstall it where a C++ compiler is present."
            )
        self.kernels.append(info)

    def content_hash(self) -> str:
        """Hash over the content of all announced files, so that a rebuilt kernel counts as new."""
        digest = hashlib.sha256()
        for path in sorted({k.path for k in self.kernels}):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
        if self.simt_kernels:
            from .simt import preludes

            for prelude in sorted(preludes().iterdir(), key=lambda p: p.name):
                digest.update(prelude.read_bytes())
        return digest.hexdigest()[:16]
