"""Facts about this computer: ``penstock.machine()``.

::

    facts              Machine and Gpu: the facts as plain values
    collect            collects all facts
      host, software   operating system and processor; Python and torch
      cgroup           control group limits
      gpu              installed GPUs (nvidia, amd)
      image_libraries  JPEG decoders
    gpu_usage          current load of the GPUs
    pcie, storage      PCIe link of a GPU; storage device behind a path
    oom                kernel OOM kills
    child_process      runs code that may hang or crash (used by vendor_tools and trial runs)
    kernel_files       reads /proc and /sys
"""

from __future__ import annotations

from penstock.callable_package import make_callable

make_callable(__name__, "penstock.machine.collect", "machine")
