"""Targets: one file a family, over the shared decoder-only network in `decoder.py`."""
