"""Target families, one module each, over the shared decoder-only network in `decoder.py`."""
