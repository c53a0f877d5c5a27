"""What the user allows: one frozen object, the same keys everywhere.

``Policy(plugins="+w8a8", allow="lossy")``, ``--backend-option plugins=+w8a8`` and
``MLX_ACCEL_PLUGINS=+w8a8`` mean the same. An option given on the command line wins over the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import PolicyError
from .manifest import installed_options

ENV_PREFIX = "MLX_ACCEL_"


@dataclass(frozen=True)
class Policy:
    """Options of :func:`backend_core.accelerate`.

    plugins
        Names joined by commas. ``+name`` insists on a plugin: it is an error if that plugin cannot serve.
        ``-name`` turns one off. Bare names are the only plugins used (and insisted on). ``none``: no plugin.
    allow
        ``"lossy"`` admits offers that change results beyond rounding. Empty: only exact ones.
    race
        ``"on"``: use the profile, race what it lacks. ``"force"``: race everything again.
        ``"off"``: the profile only; what it lacks stays stock.
    deterministic
        Replace the race by a fixed order of preference, so that equal installations choose equally.
    activations
        ``"float32"``: embeddings hand out float32; ``"model"``: the model's own dtype; ``"auto"``: float32
        on x86 CPUs (where half precision is emulated), else the model's.
    strict
        Raise on the first plugin fault instead of recording it.
    report
        What is printed after loading: ``"short"`` (one line), ``"full"`` (a table), ``"json"``, ``"none"``.
    plugin_options
        Options that plugins brought, as (name, value) pairs: see :meth:`option`. On the command line and in the
        environment they are given like all others.
    """

    plugins: str = ""
    allow: str = ""
    race: str = "on"
    deterministic: bool = False
    activations: str = "auto"
    strict: bool = False
    report: str = "short"
    plugin_options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, values in _CHOICES.items():
            value = getattr(self, name)
            if value not in values:
                raise PolicyError(f"{name}={value!r}: not one of {', '.join(repr(v) for v in values if v != '')}")
        if not isinstance(self.plugins, str):
            raise PolicyError(f"plugins={self.plugins!r}: give the names as one string, joined by commas")
        for name in ("deterministic", "strict"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                object.__setattr__(self, name, _as_bool(name, value))
        if self.plugin_options:
            known = installed_options()
            for name, value in self.plugin_options:
                if name not in known:
                    raise PolicyError(f"unknown option {name!r}: no installed plugin has it")
                if value not in known[name]:
                    raise PolicyError(f"{name}={value!r}: not one of {', '.join(map(repr, known[name]))}")
        for word in self.plugins.split(","):
            if word.strip() in ("+", "-"):
                raise PolicyError(f"plugins={self.plugins!r}: a sign without a plugin name")

    @property
    def named_plugins(self) -> tuple[str, ...]:
        """Plugins the user insists on."""
        words = self._words()
        return tuple(w.lstrip("+") for w in words if not w.startswith("-") and w != "none")

    @property
    def excluded_plugins(self) -> tuple[str, ...]:
        """Plugins the user turns off."""
        return tuple(w[1:] for w in self._words() if w.startswith("-"))

    def admits_plugin(self, name: str) -> bool:
        """True if `name` may be used."""
        words, name = self._words(), name.replace("-", "_")
        if f"-{name}" in words:
            return False
        only = [w for w in words if w[0] not in "+-"]
        return not only or name in only or f"+{name}" in words

    def option(self, name: str) -> str:
        """The value of a plugin's option: the one given, else its default ("" if no installed plugin has it)."""
        for key, value in self.plugin_options:
            if key == name:
                return value
        return installed_options().get(name, ("",))[0]

    @property
    def allow_lossy(self) -> bool:
        return "lossy" in self.allow

    def _words(self) -> list[str]:
        words = [w.strip() for w in self.plugins.split(",") if w.strip()]
        # A distribution's dashes and a module's underscores name the same plugin.
        return [w[0] + w[1:].replace("-", "_") for w in words]

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Names of the core's own options."""
        return tuple(f.name for f in dataclasses.fields(cls) if f.name != "plugin_options")

    @classmethod
    def from_options(cls, options: Iterable[str] = (), env: Mapping[str, str] | None = None) -> Policy:
        """Policy from ``KEY=VALUE`` strings over the environment (``os.environ`` by default).

        Raises PolicyError for an unknown key, a missing ``=`` or a value that does not exist. An empty
        environment variable counts as unset.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        own, brought = cls.keys(), tuple(installed_options())
        keys = (*own, *(key for key in brought if key not in own))
        for key in own:
            if value := env.get(ENV_PREFIX + key.upper(), "").strip():
                try:
                    cls(**{key: value})  # type: ignore[arg-type]
                except PolicyError as error:
                    raise PolicyError(f"environment variable {ENV_PREFIX}{key.upper()}: {error}") from None
                values[key] = value
        given: dict[str, str] = {}
        for option in options:
            key, sep, value = option.partition("=")
            key, value = key.strip(), value.strip()
            if key not in keys:
                close = difflib.get_close_matches(key, keys, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise PolicyError(f"unknown option {key!r} (options: {', '.join(keys)}).{hint}")
            if not sep:
                raise PolicyError(f"option {key!r} needs a value: {key}=VALUE")
            # plugins= may be given several times and adds up; of the others the last one counts.
            given[key] = f"{given[key]},{value}" if key == "plugins" and key in given else value
        pairs = {key: given.pop(key, env.get(ENV_PREFIX + key.upper(), "").strip()) for key in keys if key not in own}
        return cls(**{**values, **given}, plugin_options=tuple((key, v) for key, v in pairs.items() if v))

    def as_dict(self) -> dict[str, Any]:
        """The core's options by name, and those of plugins that were given."""
        return {**{key: getattr(self, key) for key in self.keys()}, **dict(self.plugin_options)}


_CHOICES: dict[str, tuple[str, ...]] = {
    "allow": ("", "lossy"),
    "race": ("on", "off", "force"),
    "activations": ("auto", "model", "float32"),
    "report": ("short", "full", "json", "none"),
}


#: Variables that are no policy options.
OTHER_VARIABLES = ("BACKEND", "NO_HOOK", "CACHE", "ISA", "THREADS", "NATIVE", "BUILD_NATIVE")


def strange_variables(env: Mapping[str, str] | None = None) -> list[str]:
    """Sentences about MLX_ACCEL_ variables that nothing reads or whose value cannot be used."""
    env = os.environ if env is None else env
    known = [*map(str.upper, Policy.keys()), *map(str.upper, installed_options()), *OTHER_VARIABLES]
    notes = []
    for variable in sorted(env):
        name = variable.removeprefix(ENV_PREFIX)
        if variable.startswith(ENV_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {ENV_PREFIX}{close[0]}?)" if close else ""
            notes.append(f"environment variable {variable} is not known{hint}")
    threads = env.get(ENV_PREFIX + "THREADS", "").strip()
    if threads and not (threads.isdecimal() and int(threads) > 0):
        notes.append(f"environment variable {ENV_PREFIX}THREADS={threads} is not a positive number and is ignored")
    return notes


def _as_bool(name: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise PolicyError(f"{name}={value!r}: use 1 or 0")
