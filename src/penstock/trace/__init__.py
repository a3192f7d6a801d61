"""Tracing: records what a loader's processes do, and shows where the time goes.

Recording, in the training process and the workers:

    record            buffers of fixed-size records, ``penstock.span``
    recorder          in the training process: its own buffer, and the buffers of the workers
    worker_recorder   in a worker
    transform_spans   one span per transform of a ``Compose``
    gpu_events        copies and steps, timed by GPU events

Reading, from plain records (without a loader, workers or a GPU):

    records --> model: lanes of spans --> terminal, html, perfetto
                  +--> accounting: totals --> diagnosis: the bottleneck
                  +--> simulator: the run with different settings

    timeline          ``penstock.Timeline``: the public interface to all of these
    what_if           ``penstock.simulate``
    stats             ``loader.stats()``: current rates, from the records of the training process
    files             trace files
    writer            writes the trace file of a loader during the run
"""
