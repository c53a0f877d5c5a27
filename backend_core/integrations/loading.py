"""The one patch point per host: its ``load_model``.

mlx-lm's ``load`` and ``sharded_load`` look ``load_model`` up as a global of ``mlx_lm.utils`` each time, so
wrapping it there reaches every command, also where a module runs a second time as ``__main__``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import core
from ..checkpoints import UnknownQuantization, check_quantization
from ..errors import AccelError, ModelError
from ..policy import Policy
from ..report import Report
from ..sites import CheckpointSite


@dataclass(frozen=True)
class Context:
    """What is in force: the policy, and the host command that runs ("" for library use)."""

    policy: Policy
    command: str = ""
    stays_stock: bool = False


def wrap(host: str, original: Callable[..., Any], current: Callable[[], Context | None]) -> Callable[..., Any]:
    """`original` with acceleration while `current()` is a context."""

    @functools.wraps(original)
    def load_model(model_path: Any, lazy: bool = False, *args: Any, **kwargs: Any) -> Any:
        context = current()
        if context is None or context.stays_stock:
            return original(model_path, lazy, *args, **kwargs)
        sharded = sys._getframe(1).f_code.co_name == "sharded_load"
        try:
            return _load(host, original, context, sharded, model_path, lazy, args, kwargs)
        except (AccelError, UnknownQuantization) as error:
            # A command has one message and one exit code; a library and a server thread get the exception.
            if context.command and threading.current_thread() is threading.main_thread():
                sys.stderr.write(f"{context.command}: error: {error}\n")
                raise SystemExit(2) from error
            raise
        except KeyboardInterrupt:
            sys.stderr.write("[accel] interrupted; the model was left stock\n")
            if context.command and threading.current_thread() is threading.main_thread():
                raise SystemExit(130) from None
            raise

    load_model._accel_original = original  # type: ignore[attr-defined]
    return load_model


def _load(host: str, original: Callable[..., Any], context: Context, sharded: bool, model_path: Any,
          lazy: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # fmt: skip
    plugins = core.plugin_host(context.policy)
    arguments = _by_name(original, (model_path, lazy, *args), kwargs)
    arguments, adapted = adapt(plugins, host, Path(model_path), original, arguments)
    try:
        result = call(host, original, arguments)
    except Exception as error:
        raise_if_damaged(Path(model_path), error, ignore_format=bool(adapted))
        raise
    model = result[0] if isinstance(result, tuple) else result
    if lazy and sharded:
        _accelerate_at_first_call(model, context.policy)
    elif lazy:
        sys.stderr.write("[accel] loaded lazily (its weights are about to be rewritten): runs stock\n")
    else:
        report = core.accelerate(model, context.policy, host=plugins)
        if adapted:
            report.note(f"checkpoint read by {adapted}")
        for note in model.__dict__.pop("_accel_notes", ()):
            report.note(note)
        show(report, context.policy)
    return result


def _by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, as adapt_checkpoint offers want them."""
    names = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def adapt(plugins: Any, host: str, path: Path, original: Callable[..., Any], arguments: dict[str, Any]
          ) -> tuple[dict[str, Any], str]:  # fmt: skip
    """(arguments for :func:`call`, label of the offer that adapted them or "").

    original
        The host's own ``load_model``; `arguments` are its by name.

    The quantization metadata of what no plugin adapts is checked. Raises UnknownQuantization, or ModelError
    if an offer fails.
    """
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        files = tuple(sorted(p.name for p in path.iterdir()))
    except (OSError, ValueError):
        return arguments, ""  # stock's own message names the file
    if not isinstance(config, dict):
        return arguments, ""
    method = config.get("quantization_config") or {}
    site = CheckpointSite(
        path=str(path), host=host, model_type=str(config.get("model_type", "")),
        quant_method=str(method.get("quant_method", "")) if isinstance(method, dict) else "",
        quantization=json.dumps(config.get("quantization") or method or "", sort_keys=True), files=files,
    )  # fmt: skip
    offers, _ = plugins.collect(site) if plugins.implements("adapt_checkpoint") else ([], [])
    if offers:
        best = max(offers, key=lambda o: (o.preference, o.label))
        with_classes = {"get_model_classes": _classes_of(host, original), **arguments}
        try:
            return dict(best.build(with_classes)), best.label
        except AccelError:
            raise
        except Exception as error:
            raise ModelError(f"{path}: {best.label} cannot read it: {type(error).__name__}: {error}") from error
    check_quantization(config, path)
    return arguments, ""


def _classes_of(host: str, original: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The function by which `original` finds a model's classes."""
    parameter = inspect.signature(original).parameters.get("get_model_classes")
    return _found_classes if parameter is None else parameter.default


#: One load at a time finds other classes in mlx-vlm, where they are no argument.
_CLASSES_LOCK = threading.RLock()
_found = threading.local()


def _found_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """The classes of the package that mlx-vlm has just found."""
    return _found.package.Model, _found.package.ModelConfig


def call(host: str, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """``original(**arguments)``, with ``get_model_classes`` for hosts that have no such argument too."""
    if "get_model_classes" in inspect.signature(original).parameters or "get_model_classes" not in arguments:
        return original(**arguments)
    arguments = dict(arguments)
    get_model_classes = arguments.pop("get_model_classes")
    utils: Any = importlib.import_module(f"{host}.utils")
    stock = utils.get_model_and_args

    def get_model_and_args(config: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, str]:
        _found.package, model_type = stock(config, *args, **kwargs)
        model_class, _ = get_model_classes(config=config)
        return _WithModel(_found.package, model_class), model_type

    with _CLASSES_LOCK:
        utils.get_model_and_args = get_model_and_args
        try:
            return original(**arguments)
        finally:
            utils.get_model_and_args = stock


class _WithModel:
    """A model's package with another ``Model``."""

    def __init__(self, package: Any, model: Any) -> None:
        self._package, self.Model = package, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)


def raise_if_damaged(path: Path, error: Exception, ignore_format: bool = False) -> None:
    """Turn stock's exception into one that names the damage, if the directory is damaged.

    Raises ModelError with the first fault and its mend. ignore_format: a plugin knows the format.
    """
    from ..doctor.model import check_model

    faults = [
        c
        for c in check_model(path)
        if c.status == "fault" and c.name != "model.memory" and not (ignore_format and c.name == "model.quantization")
    ]
    if faults:
        raise ModelError(f"{path}: {faults[0].detail.rstrip('.')}. {faults[0].mend}") from error


def _accelerate_at_first_call(model: Any, policy: Policy) -> None:
    """For sharded loading: layers are still to be replaced and loaded, so decide at the first forward pass."""
    stock = type(model)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__class__ = stock
        show(core.accelerate(self, policy), policy)
        return self(*args, **kwargs)

    namespace = {"__call__": __call__, "__module__": stock.__module__, "__qualname__": stock.__qualname__}
    model.__class__ = type(stock.__name__, (stock,), namespace)
    sys.stderr.write("[accel] distributed: selection follows once the shards are in place\n")


def show(report: Report, policy: Policy) -> None:
    """Print the report to stderr in the form the policy asks for."""
    if policy.report == "short":
        sys.stderr.write(report.line() + "\n")
    elif policy.report == "json":
        sys.stderr.write(report.to_json() + "\n")
    elif policy.report == "full":
        from ..cli.tables import print_report

        print_report(report, stderr=True)
    sys.stderr.flush()


def load(path: str | Path, policy: Policy, **kwargs: Any) -> tuple[Any, Any]:
    """See :func:`backend_core.load`."""
    utils: Any = importlib.import_module("mlx_lm.utils")
    function = utils.load_model
    original = getattr(function, "_accel_original", function)
    text = str(path)
    if text.startswith(("/", "./", "../", "~")) and not Path(text).expanduser().exists():
        raise ModelError(f"model directory {text} does not exist")
    context = Context(policy)
    utils.load_model = wrap("mlx_lm", original, lambda: context)
    try:
        return utils.load(text, **kwargs)
    finally:
        utils.load_model = function
