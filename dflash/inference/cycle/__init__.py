"""One cycle on the device: draft, verify, commit, and the choice of the next block size."""
