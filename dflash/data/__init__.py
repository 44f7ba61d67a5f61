"""Data sets: corpora and users' files, their storage, tokenizer training, encoding, batches."""
