"""Shared between processes: the shared file, slots, batch layout, payloads and messages."""
