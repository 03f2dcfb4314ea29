"""Training on images: settings, schedules, checkpoints, and the loop."""
