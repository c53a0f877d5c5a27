"""Which probe serves which site."""

from __future__ import annotations

from .probes import LinearProbe, MultiProbe, Probe, SwitchProbe
from .probes_attention import AttentionProbe
from .probes_cache import UpdateProbe
from .probes_join import JoinProbe, StackProbe
from .probes_ops import OP_PROBES
from .sites import AttentionSite, JoinSite, LinearSite, OpSite, Site

_LINEAR: dict[str, type[Probe]] = {
    "linear": LinearProbe,
    "embedding": LinearProbe,
    "switch": SwitchProbe,
    "multi": MultiProbe,
}


def probe_for(site: Site) -> Probe:
    """The probe of a site. Raises KeyError for a kind of site that is not installed."""
    if isinstance(site, LinearSite):
        return _LINEAR[site.kind](site)
    if isinstance(site, OpSite):
        return UpdateProbe(site) if site.op == "kv_update" else OP_PROBES[site.op](site)
    if isinstance(site, AttentionSite):
        return AttentionProbe(site)
    if isinstance(site, JoinSite):
        return StackProbe(site) if site.kind == "stack" else JoinProbe(site)
    raise KeyError(site.hook)
