"""The insides of stacked training: the batched forward pass, Keras's rules, one tensor for all."""
