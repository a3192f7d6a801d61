"""Random programs around a loader, each compared with a reference, and made small when they differ.

    record      one program as a plain record: printable, and made again from its print
    parts       what a program is made of: datasets, samplers, collates, places of generators
    promises    the combinations that the documentation excludes, each with its sentence
    running     runs a program: the loop of the user, and the events in it
    checking    compares a run with its references; returns what differs
    shrinking   makes a failing program smaller by dropping parts of it
    driver      runs many programs in a child process that may hang or die

``python -m support.programs --minutes 60 --seed 5`` in ``tests`` runs for an hour.
"""
