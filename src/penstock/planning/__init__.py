"""From facts, options and measured times to a plan, with a reason for every choice.

::

    inputs         LoaderRequest, Workload: what was asked for, what the work is like
    decisions      make_plan; the public penstock.plan
      worker_count   how many workers pay
    plan           Plan, Choice, Problem: the results
    problems       what is wrong with a machine: amd_override
    safety         requests that would hang or crash here
    sample_timing  measures a dataset
    prefetch_depth adapts while a loader runs
    quantities     counts, durations and sizes as text
"""
