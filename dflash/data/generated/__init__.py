"""Data sets generated from word lists and from the standard library of Python."""
