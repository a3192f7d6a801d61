"""Random programs around a loader, compared with a reference and shrunk on failure.

    record      one program as a plain record that can be rebuilt from its repr
    parts       building blocks: datasets, samplers, collate functions, generators
    promises    combinations that the documentation excludes, each with its sentence
    running     runs a program: the user's loop and its events
    checking    compares a run with its references and returns the differences
    shrinking   makes a failing program smaller by dropping parts of it
    driver      runs many programs in a child process that can hang or die

``python -m support.programs --minutes 60 --seed 5`` in ``tests`` runs for an hour.
"""
