"""Makes ``import torch`` cheaper in the hundreds of programs that tests start.

Python imports this file when it starts, because ``tests/conftest.py`` puts its folder in
PYTHONPATH. The garbage collector is off while torch is imported, and torch's own objects are
excluded from later collections, such as the one at the end of the program. This saves 0.55 of
2.3 s. What a program creates after ``import torch`` is collected as usual.

Tested by ``tests/repo/test_quick_torch.py``.
"""

import gc
import sys


class _QuickTorch:
    """Import hook that wraps the execution of the module ``torch``."""

    def __init__(self):
        self._is_searching = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self._is_searching:
            return None
        import importlib.util  # only here: most programs never ask for torch

        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            _wrap(spec.loader)
        return spec


def _wrap(loader):
    execute = loader.exec_module

    def exec_module(module):
        vars(loader).pop("exec_module", None)
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            execute(module)
        finally:
            gc.freeze()
            if is_collecting:
                gc.enable()

    loader.exec_module = exec_module


sys.meta_path.insert(0, _QuickTorch())
