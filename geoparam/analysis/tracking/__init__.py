"""The insides of the tracker: what is measured, on the device, and what is kept of it."""
