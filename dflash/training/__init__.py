"""Training: target features, optimizer, checkpoints and the loop around the models' losses."""
