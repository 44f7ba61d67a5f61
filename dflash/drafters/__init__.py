"""Drafting strategies, one module each, with the interface in `base.py`."""
