"""Many small networks trained as one: batched forward pass, Keras's rules, motion, snapshots."""
