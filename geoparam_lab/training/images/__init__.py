"""Training on images: settings, checkpoints, and the loop."""
