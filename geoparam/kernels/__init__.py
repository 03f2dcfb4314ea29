"""Kernels behind plain functions: each has a form in plain torch, which is the specification."""
