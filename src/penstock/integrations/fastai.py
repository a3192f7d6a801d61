"""fastai: explains which of its loaders run on the engine.

torch loaders in ``DataLoaders(train, valid)`` do. fastai's own ``DataLoader`` is not a subclass of
torch's. It creates torch's private iterators directly, so the patch leaves it alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

_UNREACHED = (
    "fastai's own DataLoader does not use torch's class, so it loads without Penstock. torch "
    "loaders in fastai's DataLoaders(train, valid) run on the engine"
)


def explain_unreached() -> Iterator[str]:
    """Yield a note for a script that imported fastai but iterated over no torch loader.

    Called at the end of the script, by the report of ``penstock run``.
    """
    if "fastai.data.load" in sys.modules:
        yield _UNREACHED
