"""Benchmarks of drafting strategies, and studies of what a cycle costs."""
