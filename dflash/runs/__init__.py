"""A run beside the device: its directory, records and terminal display."""
