"""The mesh, named axes, abstract parameters, processes, and what is known of chips."""
