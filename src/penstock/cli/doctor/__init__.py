"""``penstock doctor``: what is this machine, what would be done here, and what is wrong?

::

    command   facts, plan and problems; with a target, what its trial found; then report or JSON
      target    script.py:name, found without running anything
      child     starts the trial and waits for it, within a limit
        - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - another process
        trial     runs the script up to the name (script), then the stages:
        stages    length, travel, what is inside (parts, container_lines), a batch, the plan
        samples   time, form (sample_form), exceptions, randomness
        - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - notes on disk
      findings  what in the notes is a problem
      gpu_copies  with --gpu: how fast batches get to the GPUs, timed by another child (gpu_trial)
      report    all of it for a person;  watch: the GPUs, once a second
      bad_samples   another kind of target: the samples that failed, and how to get rid of them
"""
