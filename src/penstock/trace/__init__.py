"""Tracing: recording what a loader's processes do, and showing where the time went.

Recording, in the processes that work:

    record            buffers of fixed-size records, ``penstock.span``
    recorder          in the training process: its own buffer, and the workers' buffers, gathered
    worker_recorder   in a worker
    transform_spans   each transform of a ``Compose`` as a span
    gpu_events        copies and steps on the GPU's own clock

Reading, from plain records alone (no loader, worker or GPU is needed):

    records --> model: lanes of spans --> terminal, html, perfetto
                  +--> accounting: sums --> diagnosis: what limits the run
                  +--> simulator: the run with other settings

    timeline          ``penstock.Timeline``: all of it under one name
    what_if           ``penstock.simulate``
    stats             ``loader.stats()``: current rates, from the records of the training process
    files             traces on disk
    writer            writes the trace of a loader while the run goes on
"""
