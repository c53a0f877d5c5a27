"""mlx-accel plugin: dense layers in half precision on GPUs, 1 to 16 rows."""

from backend_core import Offer, hookimpl
from backend_core.simt import MOST_ROWS, Family, family_for, product

from .kernel import DENSE_QMV, cases

STEPS = (1, 2, 4, 8, 16)
FAMILIES = (
    Family("dense", DENSE_QMV, "metal", (13,), STEPS, 10, "weights read once for 8 rows"),
    Family("dense", DENSE_QMV, "cuda", (7, 0), STEPS, 10, "weights read once for 8 rows"),
)


@hookimpl
def register_kernels(registry):
    registry.simt(DENSE_QMV, cases=cases)


@hookimpl
def select_linear(site):
    if site.kind != "linear" or site.mode != "dense" or site.has_bias:
        return None
    facts = {name: getattr(site, name) for name in ("n", "k", "x_dtype", "weight_dtype", "out_dtype", "device")}
    family = family_for(FAMILIES, facts)
    if family is None:
        return None

    def build(module):
        weight = module.weight
        return product(family, facts, (weight,), stock=lambda x: x @ weight.T)

    return Offer(
        name=f"{family.name}_{site.device}",
        build=build,
        rows=(1, MOST_ROWS),
        row_invariant=True,
        exactness="rounding",
        bytes_moved=site.weight_bytes,
        preference=family.preference,
        note=family.note,
    )
