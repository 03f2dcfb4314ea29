"""Callbacks for trainers, each a few lines over the library: lightning.py, transformers.py."""
