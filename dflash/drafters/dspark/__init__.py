"""DSpark: DFlash with a previous-token head and a confidence head."""
