"""Data sets: sources, encoding, corpora, packing, batches, and training of tokenizers.

Functions raise InputError for unusable data, and name the file and line.
"""
