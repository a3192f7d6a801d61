"""Planning: from machine facts, options and measured times to a plan with reasons.

::

    inputs         LoaderRequest, Workload: the options given, and the facts about the data
    decisions      make_plan; the public penstock.plan
      worker_count   the number of workers
    plan           Plan, Choice, Problem: the results
    problems       problems of a machine, including amd_override
    safety         adjusts arguments that would hang or crash on this machine
    sample_timing  times the samples of a dataset
    prefetch_depth adapts the prefetch depth while a loader runs
    quantities     counts, durations and sizes as text
"""
