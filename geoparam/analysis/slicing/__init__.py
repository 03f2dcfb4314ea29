"""The insides of slices: planes, convex polygons, a network that is affine in pieces."""
