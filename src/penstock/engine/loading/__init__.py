"""In whichever process loads: fetching, collating, gathering, thread order and bad samples."""
