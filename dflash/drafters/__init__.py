"""Drafting strategies: one file each, behind the seam in `base.py`."""
