"""Measuring: strategies × tasks, what a cycle is made of, and studies of costs."""
