"""Data sets that others have published: their files, and their questions as examples."""
