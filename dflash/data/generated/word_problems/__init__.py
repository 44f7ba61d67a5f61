"""Generated multi-step word problems."""
