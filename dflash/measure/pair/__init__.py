"""Diagnosis of a pair of target and drafter."""
