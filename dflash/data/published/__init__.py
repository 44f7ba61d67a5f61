"""Published data sets: their files, and their questions as examples."""
