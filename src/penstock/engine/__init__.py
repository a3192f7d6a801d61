"""Who does the work, and how does it come back?

    this process                                  |  worker processes
    ----------------------------------------------+----------------------------------------
    Delivery  -- leases: parts of batches ------> |  worker loop: dataset[i], written
       |      <----- replies: a few bytes ------- |  straight into a slot
       |                                          |
       +-- Ring: slots in one shared file ========+== the same slots, mapped
       +-- pools: processes, threads              |
    Fork server (its own process, clean, one thread) -+-> forks the workers

A batch is written once, by the worker, into a slot of shared memory; what crosses a pipe is a few
bytes. ``Delivery`` puts parts together, keeps the order, and notices a dead worker.

Sub-rooms: ``start`` (how workers come to be), ``travel`` (how the user's objects reach them),
``shared`` (containers that all of them share), ``batch`` (from samples to a batch in a slot).
"""
