"""``from penstock.legacy import create_dataloader``: the door to integrations/legacy_names.py.

``apply_full_patch`` and ``FallbackConv2d``, of scripts for cards whose convolutions fail, come from
``penstock.compute``.
"""

from penstock.integrations.legacy_names import (
    create_dataloader,
    get_recommended_num_workers,
    get_safe_num_workers,
    get_safe_num_workers_table,
    is_windows,
    patch_dataloader,
    print_dataloader_config,
    print_rocm_info,
    print_safe_num_workers_table,
    set_seed,
    setup_rocm_multiprocessing,
    verify_reproducibility,
)

__all__ = [
    "create_dataloader",
    "get_recommended_num_workers",
    "get_safe_num_workers",
    "get_safe_num_workers_table",
    "is_windows",
    "patch_dataloader",
    "print_dataloader_config",
    "print_rocm_info",
    "print_safe_num_workers_table",
    "set_seed",
    "setup_rocm_multiprocessing",
    "verify_reproducibility",
]


def __getattr__(name: str) -> object:  # these need torch, and some here must come before it
    if name in ("FallbackConv2d", "apply_full_patch"):
        from penstock import compute

        return getattr(compute, name)
    raise AttributeError(f"module 'penstock.legacy' has no attribute {name!r}")
