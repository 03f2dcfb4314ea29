"""Reading a model: its layers and what follows them, and what they see on a batch."""
