"""Training on text: settings, the optimizer of each method, and the loop."""
