"""Evaluates row filters in this process: a typed tree and Arrow batches in, a verdict for each row out.

`verdicts` is the entry point. `compiler` turns a tree into a Python function. The other modules have
PostgreSQL's functions, by kind, over the Python values that `values` describes.
"""
