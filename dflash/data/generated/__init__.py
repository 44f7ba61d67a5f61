"""Data sets that are made on the spot, from word lists and from the standard library."""
