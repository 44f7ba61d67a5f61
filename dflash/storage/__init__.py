"""Reads and writes files on disks and in buckets of object stores."""
