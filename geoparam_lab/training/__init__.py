"""Training for the experiments: stacks of small networks, networks for images, and their tasks."""
