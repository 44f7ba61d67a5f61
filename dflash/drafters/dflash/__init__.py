"""DFlash: a whole block drafted in one pass."""
