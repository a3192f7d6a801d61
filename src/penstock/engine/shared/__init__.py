"""Millions of small objects in memory that every worker shares."""
