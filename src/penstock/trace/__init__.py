"""Tracing: records what a loader's processes do, and shows where the time goes.

Recording, in the training process and the workers:

    record            buffers of fixed-size records, ``penstock.span``
    recorder          in the training process: its own buffer, and the buffers of the workers
    worker_recorder   in a worker
    transform_spans   one span per transform of a ``Compose``
    gpu_events        copies and steps, timed by GPU events

Reading, from plain records (without a loader, workers or a GPU):

    records --> model: lanes of spans --> terminal, html, perfetto
                  +--> span_table: columns --> accounting: totals --> diagnosis: the bottleneck
                  +--> simulator: the run with different settings

    timeline          ``penstock.Timeline``: the public interface to all of these
    regression        alarms: a run that waits too much, or is slower than another, beyond the noise
    what_if           ``penstock.simulate``
    record_columns    records as NumPy columns, for metrics
    live_status       what ``penstock top`` reads from outside
    metrics           ``loader.metrics()``: rates, waits and the verdict of the last seconds
    prometheus        ``penstock.serve_metrics``: the same for Prometheus
    notebook          display of a loader in a notebook
    files             trace files
    writer            writes the trace file of a loader during the run
"""
