"""What parent and workers share: the shared file, slots, batch layout, payloads, messages."""
