"""Installing and removing: an accelerated layer is the same object under a subclass of its stock class.

The instance keeps its parameters, its children, its name and its place in the model; only its class changes,
to a subclass that carries the stock class's name, and one entry `_accel` is added to its `__dict__` (not as
an attribute, which would make it a child of the module). The stock classes themselves are never touched, so
layers of other models in the process stay what they are.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import native
from .layer_classes import format_of
from .walk import dtype_name, stock_class

if TYPE_CHECKING:
    from .probe_base import Probe
    from .report import Report

KEY = "_accel"
_CLASSES: dict[type, type] = {}


class Slot:
    """What an accelerated layer looks up per call: callables by rows, and whether they are still valid.

    small, large
        Callables for rows 1..16 and for more; None is stock.
    snapshot
        The module's arrays at selection time. Side data of a callable belongs to these very arrays; as soon
        as the module holds others, stock runs.
    cast
        For embeddings under ``activations=float32``: lookups are handed out as float32.
    """

    __slots__ = ("cast", "dtype", "k", "large", "last", "late", "most_small", "probe", "report", "single", "small",
                 "snapshot", "stale", "variants")  # fmt: skip

    def __init__(
        self,
        module: Any,
        report: Report,
        probe: Probe | None = None,
        small: Callable[..., Any] | None = None,
        large: Callable[..., Any] | None = None,
        late: Callable[[Any, Probe, str], Slot | None] | None = None,
        cast: bool = False,
    ) -> None:
        import mlx.core as mx

        self.probe, self.report, self.cast, self.late = probe, report, cast, late
        self.small, self.large = small, large
        # One callable for all rows also serves inside a shapeless trace, where rows are unknown.
        self.single = small if small is large else None
        self.snapshot = native.snapshot(module)
        self.dtype = getattr(mx, probe.site.x_dtype) if probe else None
        self.k = probe.row_elements if probe else 1
        self.most_small = 16 * self.k
        self.last = probe.last_dimension if probe else None
        self.stale = False
        self.variants: dict[str, Slot | None] = {}

    def fresh(self, module: Any) -> bool:
        """True while the module holds the arrays it had at selection time."""
        return bool(self.snapshot.holds(module))

    def call(self, module: Any, x: Any, *rest: Any) -> Any:
        """The layer's result: the chosen callable where it is valid, else stock."""
        if not self.snapshot.holds(module):
            return self._stale(module, x, *rest)
        if x.dtype != self.dtype:
            return self._other_dtype(module, x, *rest)
        # A wrong width is stock's error to raise, here and not when the kernel runs.
        if self.last is not None and (not (shape := x.shape) or shape[-1] != self.last):
            return self._stock(module, x, *rest)
        size = x.size
        if size:
            if self.single is not None:
                return self.single(x, *rest)
            if size <= self.most_small and self.small is not None and not native.in_dynamic_tracing():
                return self.small(x, *rest)
        return self._by_rows(module, size, x, *rest)

    def _stock(self, module: Any, x: Any, *rest: Any) -> Any:
        assert self.probe is not None
        return self.probe.stock(module, x, *rest)

    def _by_rows(self, module: Any, size: int, x: Any, *rest: Any) -> Any:
        assert self.probe is not None
        if size == 0:
            return self.probe.empty(x, *rest)
        if self.small is not self.large and native.in_dynamic_tracing():
            return self.probe.stock(module, x, *rest)
        function = self.small if size <= self.most_small else self.large
        return self.probe.stock(module, x, *rest) if function is None else function(x, *rest)

    def _stale(self, module: Any, x: Any, *rest: Any) -> Any:
        assert self.probe is not None
        # Inside a trace the module holds tracers for the time being; that is not a change of weights.
        if not self.stale and not native.in_tracing(x):
            self.stale = True
            self.report.note(
                f"{self.probe.site.path}: its weights were replaced after selection; stock runs there until "
                f"accelerate() is called again"
            )
        return self.probe.stock(module, x, *rest)

    def _other_dtype(self, module: Any, x: Any, *rest: Any) -> Any:
        """Activations of a dtype that was not verified: decide once for it, outside of any trace."""
        assert self.probe is not None
        name = dtype_name(x.dtype)
        if name not in ("float32", "float16", "bfloat16"):
            return self.probe.stock(module, x, *rest)
        variant = self.variants.get(name)
        if variant is None and name not in self.variants and self.late is not None and not native.in_tracing(x):
            variant = self.variants[name] = self.late(module, self.probe, name)
        if variant is not None:
            return variant.call(module, x, *rest)
        return self.probe.empty(x, *rest) if x.size == 0 else self.probe.stock(module, x, *rest)


def accelerated_class(stock: type) -> type:
    """The subclass of a stock class whose instances ask their slot first; one per stock class."""
    if stock in _CLASSES:
        return _CLASSES[stock]

    # Each method asks for the slot with .get: a bound method that someone kept outlives restore().

    namespace: dict[str, Any] = {
        "_accel_stock": stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": stock_reduce,
    }
    kind = _kind(stock)
    if kind == "embedding":

        def lookup(self: Any, x: Any) -> Any:
            slot = self.__dict__.get(KEY)
            return float32_lookup(self, x) if slot is not None and slot.cast else stock.__call__(self, x)

        def as_linear(self: Any, x: Any) -> Any:
            slot = self.__dict__.get(KEY)
            if slot is None or slot.probe is None:
                return stock.as_linear(self, x)  # type: ignore[attr-defined]
            return slot.call(self, x)

        namespace.update(__call__=lookup, as_linear=as_linear)
    elif kind == "switch":

        def switch(self: Any, x: Any, indices: Any, sorted_indices: bool = False) -> Any:
            slot = self.__dict__.get(KEY)
            return (
                stock.__call__(self, x, indices, sorted_indices)
                if slot is None
                else slot.call(self, x, indices, sorted_indices)
            )

        namespace["__call__"] = switch
    elif kind == "multi":

        def multi(self: Any, x: Any, transpose: bool = True) -> Any:
            slot = self.__dict__.get(KEY)
            return stock.__call__(self, x, transpose) if slot is None else slot.call(self, x, transpose)

        namespace["__call__"] = multi
    elif kind == "rope":

        def rope(self: Any, x: Any, offset: Any = 0, *rest: Any, **options: Any) -> Any:
            slot = self.__dict__.get(KEY)
            # Offers take one position for the whole batch; a position per sequence is an array.
            if slot is None or type(offset) is not int or rest or options:
                return stock.__call__(self, x, offset, *rest, **options)
            return slot.call(self, x, offset)

        namespace["__call__"] = rope
    else:

        def linear(self: Any, x: Any) -> Any:
            slot = self.__dict__.get(KEY)
            return stock.__call__(self, x) if slot is None else slot.call(self, x)

        namespace["__call__"] = linear
    for name in ("__call__", "as_linear"):
        if name in namespace:
            namespace[name].__name__ = name
            namespace[name].__qualname__ = f"{stock.__qualname__}.{name}"
            namespace[name].__doc__ = getattr(stock, name).__doc__
    cls = type(stock.__name__, (stock,), namespace)
    _CLASSES[stock] = cls
    return cls


def install(module: Any, slot: Slot) -> None:
    """Put `slot` into effect for one layer; replaces an earlier slot."""
    module.__dict__[KEY] = slot
    cls = accelerated_class(stock_class(module))
    if type(module) is not cls:
        module.__class__ = cls


def uninstall(module: Any) -> bool:
    """Give the layer its stock class back. False if it was not accelerated."""
    stock = type(module).__dict__.get("_accel_stock")
    if stock is None or KEY not in module.__dict__:
        return False
    module.__class__ = stock
    del module.__dict__[KEY]
    return True


def slot_of(module: Any) -> Slot | None:
    """The slot of an accelerated layer, else None."""
    return module.__dict__.get(KEY) if "_accel_stock" in type(module).__dict__ else None


def float32_lookup(module: Any, x: Any) -> Any:
    """Rows of a (quantized) embedding in float32.

    Scales are widened before they are multiplied, so that the values are those of the checkpoint and not
    those rounded to half precision.
    """
    import mlx.core as mx

    if "scales" not in module:
        return module["weight"][x].astype(mx.float32)
    if format_of(stock_class(module)) is not None:
        return module.rows(x, mx.float32)
    scales, biases = module["scales"][x], module.get("biases")
    if scales.dtype == mx.uint8:
        return mx.dequantize(module["weight"][x], scales, group_size=module.group_size, bits=module.bits,
                             mode=module.mode, dtype=mx.float32)  # fmt: skip
    return mx.dequantize(
        module["weight"][x], scales.astype(mx.float32), None if biases is None else biases[x].astype(mx.float32),
        group_size=module.group_size, bits=module.bits, mode=module.mode,
    )  # fmt: skip


def _kind(stock: type) -> str:
    """How the class is called; layers with one argument are ``"linear"``."""
    from .rope import is_rope
    from .walk import linear_kinds

    return "rope" if is_rope(stock) else linear_kinds().get(stock, "linear")


def stock_reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Copies and pickles are stock layers: kernels and races belong to this process and this object.

    copyreg's reconstructor is what pickle itself uses for subclasses of dict (protocols 0 and 1), so that
    the pickle can be read where mlx-accel is not installed.
    """
    stock = type(self)._accel_stock
    state = {k: v for k, v in self.__dict__.items() if not k.startswith(KEY)}
    return copyreg._reconstructor, (stock, dict, dict(self)), state  # type: ignore[attr-defined]
