"""The helper module beside the tests, importable under every import mode."""

import sys
from pathlib import Path

from backend_core.testing.fixtures import lab_compiler

__all__ = ["lab_compiler"]

sys.path.insert(0, str(Path(__file__).parent))
