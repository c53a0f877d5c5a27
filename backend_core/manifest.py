"""mlx_accel.toml: what a plugin needs, readable without importing it.

    api = 1                       # version of the hook interface the plugin was written for
    hooks = ["select_linear"]     # what it implements (for listings)
    formats = ["my_format"]       # values of quant_method in config.json that it reads
    [requires]
    mlx = ">=0.32,<0.34"          # version ranges of installed distributions, any name
    devices = ["cpu"]             # at least one of them must be present
    isa = ["avx2", "neon"]        # at least one of them, for plugins with nothing but CPU kernels
    [options]
    my_plugin = ["auto", "small"] # a policy option of the plugin's own: its values, the default first

The file lies in the plugin's top-level package. A plugin without one is taken as `api = 1` with no
requirements, so that the smallest plugin is one Python file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from .hookspecs import API_VERSION, ENTRY_POINT_GROUP
from .sites import DEVICES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

FILE_NAME = "mlx_accel.toml"
_KEYS = {"api", "name", "hooks", "requires", "description", "options", "formats"}


@dataclass(frozen=True)
class Manifest:
    """The parsed file; ``path`` is None if the plugin ships none."""

    path: Path | None = None
    api: int = API_VERSION
    hooks: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    isa: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    formats: tuple[str, ...] = ()

    def unmet(self, devices: tuple[str, ...], isa: tuple[str, ...]) -> str:
        """Why the plugin cannot run here, or "" if it can.

        `devices` and `isa` are what this machine has.
        """
        if self.api > API_VERSION:
            return f"needs plugin API {self.api}, this mlx-accel has {API_VERSION}: upgrade mlx-accel"
        for name, wanted in self.versions.items():
            try:
                have = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                return f"needs {name}{wanted}, which is not installed"
            if not SpecifierSet(wanted).contains(have, prereleases=True):
                return f"needs {name}{wanted}, {have} is installed"
        if self.devices and not set(self.devices) & set(devices):
            return f"needs one of the devices {', '.join(self.devices)}; here: {', '.join(devices)}"
        if self.isa and "cpu" in devices and set(self.devices) <= {"cpu"} and not set(self.isa) & set(isa):
            here = ", ".join(isa) or "none"
            return f"needs one of the instruction sets {', '.join(self.isa)}; here: {here}"
        return ""


def find(module: str) -> Path | None:
    """The manifest of the plugin whose entry point names `module`, found without importing it."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    return None


def read(path: Path) -> Manifest:
    """Parse a manifest.

    Raises ValueError, naming file and key, if it is not TOML or a value has the wrong form.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    if unknown := set(data) - _KEYS:
        raise ValueError(f"{path}: unknown keys {sorted(unknown)} (known: {sorted(_KEYS)})")
    api = data.get("api", API_VERSION)
    if not isinstance(api, int) or isinstance(api, bool) or api < 1:
        raise ValueError(f"{path}: api must be a positive integer, not {api!r}")
    requires = data.get("requires", {})
    if not isinstance(requires, dict):
        raise ValueError(f"{path}: [requires] must be a table")
    requires = dict(requires)
    devices = _words(path, "requires.devices", requires.pop("devices", []))
    if wrong := set(devices) - set(DEVICES):
        raise ValueError(f"{path}: requires.devices has {sorted(wrong)}; known: {list(DEVICES)}")
    isa = _words(path, "requires.isa", requires.pop("isa", []))
    versions = {}
    for name, wanted in requires.items():
        try:
            if not isinstance(wanted, str):
                raise InvalidSpecifier("not a string")
            versions[name] = str(SpecifierSet(wanted))
        except InvalidSpecifier as error:
            raise ValueError(f"{path}: requires.{name} = {wanted!r} is not a version range") from error
    options = data.get("options", {})
    if not isinstance(options, dict):
        raise ValueError(f"{path}: [options] must be a table")
    options = {name: _words(path, f"options.{name}", values) for name, values in options.items()}
    if unfit := [name for name, values in options.items() if not values or not name.isidentifier()]:
        raise ValueError(f"{path}: options.{unfit[0]} must be an identifier with at least one value")
    hooks, formats = (_words(path, key, data.get(key, [])) for key in ("hooks", "formats"))
    return Manifest(path, api, hooks, devices, isa, versions, options, formats)


def installed_options() -> dict[str, tuple[str, ...]]:
    """Policy options of all installed plugins -> their values, the default first. Nothing is imported."""
    found: dict[str, tuple[str, ...]] = {}
    for _, manifest in _installed():
        for name, values in manifest.options.items():
            found.setdefault(name, values)
    return found


def installed_formats() -> dict[str, str]:
    """Values of ``quant_method`` that installed plugins read -> plugin. Nothing is imported."""
    return {name: plugin for plugin, manifest in _installed() for name in manifest.formats}


def _installed() -> Iterator[tuple[str, Manifest]]:
    """Plugins with a readable manifest; what is wrong with others is said where they are loaded."""
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        try:
            if path := find(entry.module):
                yield entry.name, read(path)
        except (OSError, ValueError):
            continue


def _words(path: Path, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{path}: {key} must be a list of strings, not {value!r}")
    return tuple(value)
