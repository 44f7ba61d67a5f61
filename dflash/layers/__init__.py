"""Building blocks of targets and drafters, with the attribute names of HF checkpoints."""
