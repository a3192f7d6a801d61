"""How does a batch reach the GPU?

::

    workers write
         |
       slots, pinned once, used again when no copy reads them      pinning, fences
         |  copied on a stream of its own, ahead of the step       courier
       GPU memory
         |  bytes to floats, normalised, in one pass               finish
     training step

``to_device`` gives the same to any other iterable of batches. Nothing here opens a GPU before the
first batch is delivered, and then only the one that was chosen.
"""
