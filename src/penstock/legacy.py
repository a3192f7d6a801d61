"""``from penstock.legacy import create_dataloader``: the door to integrations/legacy_names.py.

``apply_full_patch`` and ``FallbackConv2d``, of scripts for cards whose convolutions fail, come from
``penstock.conv``.
"""

from penstock.integrations.legacy_names import *  # noqa: F403
from penstock.integrations.legacy_names import __all__ as __all__


def __getattr__(name: str) -> object:  # these need torch, and some here must come before it
    if name in ("FallbackConv2d", "apply_full_patch"):
        from penstock import conv as compute

        return getattr(compute, name)
    raise AttributeError(f"module 'penstock.legacy' has no attribute {name!r}")
