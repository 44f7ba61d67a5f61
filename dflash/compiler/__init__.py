"""What the TPU compiler makes of a run, read from its output; no TPU is needed."""
