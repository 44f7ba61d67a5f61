"""The operations that this project is about; each file holds one, with its plain-JAX reference."""
