"""Building blocks that several drafting strategies share."""
