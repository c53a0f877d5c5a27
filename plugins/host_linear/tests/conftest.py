"""The helper module beside the tests, importable under every import mode; a cache of its own for every test."""

import sys
from pathlib import Path

from backend_core.testing.fixtures import own_cache

__all__ = ["own_cache"]

sys.path.insert(0, str(Path(__file__).parent))
