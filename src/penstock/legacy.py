"""``from penstock.legacy import create_dataloader``: the door to integrations/legacy_names.py."""

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
