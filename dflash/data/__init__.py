"""Data sets: sources, encoding, corpora, packing, batches, and training of tokenizers."""
