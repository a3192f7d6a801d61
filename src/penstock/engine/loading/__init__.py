"""Loading of samples (in workers, threads or inline): fetching, collating, bad samples."""
