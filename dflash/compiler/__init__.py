"""Cost estimates of a run from the output of the TPU compiler, which needs no TPU."""
