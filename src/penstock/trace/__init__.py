"""Where did the time go?

    records (a loader's, or a file's) --> model: lanes and spans --+--> render_terminal
                                             |                     +--> render_html
                                             v                     +--> render_perfetto
                                          account: sums --> verdict: one sentence, its evidence
                                             |
                                             +--> what_if --> policy.simulator --> another model

    view       Timeline: all of it under one name
    files      traces on disk
    merging    several loaders of one program as one trace
    comparing  two of them side by side

Everything here is made from plain records: nothing needs a loader, a worker or a GPU.
"""
