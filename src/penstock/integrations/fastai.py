"""fastai: which of its loaders run on the engine.

``DataLoaders(train, valid)`` of torch's loaders does. fastai's own ``DataLoader`` is not a subclass
of torch's: it makes torch's private iterators itself, so the patch leaves it alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

_UNREACHED = (
    "fastai's own DataLoader does not use torch's class, and loads as without Penstock. Torch's "
    "loaders in fastai's DataLoaders(train, valid) run on the engine"
)


def explain_unreached() -> Iterator[str]:
    """A line for a script that imported fastai and iterated no loader of torch's.

    Called from: the report of ``penstock run``, at the end of the script.
    """
    if "fastai.data.load" in sys.modules:
        yield _UNREACHED
