"""From samples to a batch: calling the dataset, collating, and how it lies in a slot."""
