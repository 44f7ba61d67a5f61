"""DFlash2: DFlash with convolutions and a candidate selector."""
