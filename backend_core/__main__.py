"""``python -m backend_core``: where the SDK for authors of CPU kernels lies; else it is the command line.

``--cmake-dir`` prints the directory for ``mlx_accel_ROOT`` (``find_package(mlx_accel CONFIG)``),
``--include-dir`` the directory that holds ``accel/kernel.h``. Both are answered without importing mlx.
"""

from __future__ import annotations

import sys
from pathlib import Path

_FLAGS = {"--cmake-dir": "cmake", "--include-dir": "include"}


def sdk_dir(part: str) -> Path:
    """Directory of one part of the SDK, ``"cmake"`` or ``"include"``.

    Raises FileNotFoundError if it is neither in the package nor in the source tree around it.
    """
    package = Path(__file__).resolve().parent
    for base in (package / "sdk", package.parent / "kernels"):
        if (base / part).is_dir():
            return base / part
    raise FileNotFoundError(f"the mlx-accel SDK is not installed: there is no {package / 'sdk' / part}")


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) == 1 and arguments[0] in _FLAGS:
        try:
            print(sdk_dir(_FLAGS[arguments[0]]))
        except FileNotFoundError as e:
            print(e, file=sys.stderr)
            return 1
        return 0
    from .cli import main as cli

    return int(cli(arguments) or 0)


if __name__ == "__main__":
    sys.exit(main())
