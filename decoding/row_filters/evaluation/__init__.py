"""Evaluates row filters in this process.

In: a typed tree, and Arrow batches. Out: the filter's value for each row (true, false or NULL).

`verdicts` is the entry point. `columns` computes parts of a tree on whole columns. `compiler` turns the other
parts into a Python function of a row. The other modules have PostgreSQL's functions for strings, numbers and so on.
They take the Python values that `values` describes.
"""
