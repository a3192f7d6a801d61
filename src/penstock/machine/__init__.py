"""Facts about this computer: ``penstock.machine()``.

::

    facts              Machine, Gpu: the facts as plain values
    collect            finds all of them out
      host, software   the operating system and the processor; Python and torch
      cgroup           limits of control groups
      gpu              which GPUs there are: nvidia, amd
      image_libraries  JPEG decoders
    gpu_usage          what the GPUs are doing
    pcie, storage      a GPU's link; what a path is stored on
    oom                kills for want of memory
    child_process      runs what may hang or crash: vendor_tools, and others' trials
    kernel_files       reads /proc and /sys
"""

from __future__ import annotations

from penstock.callable_package import make_callable

make_callable(__name__, "penstock.machine.collect", "machine")
