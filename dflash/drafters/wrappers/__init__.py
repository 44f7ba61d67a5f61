"""Drafters that wrap another one, and choose for each sequence and cycle what is verified."""
