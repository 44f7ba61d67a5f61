"""Distillation: answers of a target, a drafter trained on them, and its measurement."""
