"""What a model is made of: its layers with units."""
