"""Moves batches to the GPU, in the training process.

::

    workers write
         |
       slots, pinned once, reused when no copy reads them            pinning, fences
         |  copied on a separate stream, ahead of the step           prefetcher
       GPU memory
         |  bytes to normalized floats, in one pass                  image_finisher
     training step

``to_device`` does the same for any other iterable of batches. Nothing here opens a GPU before the
first batch is delivered, and then only the chosen GPU is opened.
"""
