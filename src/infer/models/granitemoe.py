"""Granite 3, mixtures of experts (1B-A400M, 3B-A800M).

    x ──► RMSNorm ──► q, k, v ──► RoPE(q, k) ──► cache.attend ──► o_proj ──► + ──► RMSNorm ──► experts ──► + ──►
      └─────────────────────────────────────────────────────────────────────┘ └───────────────────────────┘

Differs from Granite by experts in the place of the MLP, whose weights add up to 1 for each token.
"""

from __future__ import annotations

from infer.models.granite import Granite


class GraniteMoe(Granite):
    pass
