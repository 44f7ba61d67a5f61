"""A run beside the device: its directory, records, terminal display, and sweeps over many runs."""
