"""The decode loop: draft, verify, commit, observe, on the device; and what feeds it."""
