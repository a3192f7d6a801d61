"""Memory and messages shared by the parent and its workers: files, slots, layouts, payloads."""
