"""In whichever process loads: fetching, collating, gathering and bad samples."""
