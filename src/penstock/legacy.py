"""``from penstock.legacy import create_dataloader``: the door to integrations/legacy_names.py."""

from penstock.integrations.legacy_names import *  # noqa: F403
from penstock.integrations.legacy_names import __all__ as __all__
