"""Reads and writes files on disks and in buckets; functions raise OSError if that fails."""
