"""Cost estimates of a run, read from the output of the TPU compiler. No TPU is needed."""
