"""Loads batches: in this process, in threads, or in worker processes.

    engine/parent  (training process)             |  engine/worker  (worker processes, threads)
    ----------------------------------------------+----------------------------------------
    dispatch  -- leases: parts of batches ------> |  loop: dataset[i], written straight into
       |      <----- replies: a few bytes ------- |  a slot
       |                                          |
       +-- ring: slots in one shared file ========+== the same slots, mapped
    fork_server  (a clean process, one thread) ---+-> forks the workers

A batch is written once, by the worker, into a slot of shared memory; what crosses a pipe is a few
bytes. The dispatcher puts parts together, keeps the order, and notices a dead worker.

``loading`` runs wherever samples are loaded, ``memory`` is what both processes see, and
``pickling`` is how the user's objects reach a worker.
"""
