"""The mesh, named axes, abstract parameters, processes, and data of chips."""
