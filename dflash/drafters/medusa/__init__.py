"""Medusa: one head per future position."""
