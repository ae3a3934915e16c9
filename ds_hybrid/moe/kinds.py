"""The two kinds of MoE layers that an engine may have."""

from ds_hybrid.moe.autoep import HybridAutoEPLayer
from ds_hybrid.moe.layer import MoE

MoELayer = HybridAutoEPLayer | MoE
"""A converted layer, or an explicit one."""
