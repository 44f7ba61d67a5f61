"""Operations with Pallas kernels, one per file, each with a plain-JAX reference."""
