"""Batch loading in the training process, in threads, or in worker processes.

    engine/parent  (training process)             |  engine/worker  (worker processes, threads)
    ----------------------------------------------+----------------------------------------
    dispatch  -- leases: parts of batches ------> |  loop: dataset[i], written directly into
       |      <----- replies: a few bytes ------- |  a slot
       |                                          |
       +-- ring: slots in one shared file ========+== the same slots, mapped
    fork_server  (a clean process, one thread) ---+-> forks the workers

A worker writes a batch once, into a slot of shared memory. Only a few bytes cross a pipe. The
dispatcher assembles the parts, keeps the order, and detects dead workers.

``loading`` runs wherever samples are loaded, ``memory`` holds what both processes share, and
``pickling`` sends the user's objects to the workers.
"""
