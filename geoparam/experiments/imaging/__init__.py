"""The insides of training on images: settings, schedules, checkpoints, and the loop."""
