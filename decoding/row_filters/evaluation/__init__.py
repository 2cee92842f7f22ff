"""Evaluates row filters in this process: a typed tree and Arrow batches in, a verdict for each row out.

`verdicts` is the entry point. `columns` computes parts of a tree on whole columns, `compiler` turns the other
parts into a Python function of a row. The other modules have PostgreSQL's functions by kind; they take the
Python values that `values` describes.
"""
