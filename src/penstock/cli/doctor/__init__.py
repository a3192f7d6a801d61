"""The ``penstock doctor`` command: see :mod:`penstock.cli.doctor.command`."""
