"""Training: data, target features, optimizer and the loop around the losses of the models."""
