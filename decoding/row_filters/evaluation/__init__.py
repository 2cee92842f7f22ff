"""Row filters evaluated in this process: a typed tree and Arrow batches in, a verdict for each row out.

`verdicts` is what others call. `compiler` makes a Python function of a tree; the other modules are the functions of
PostgreSQL, by kind, over the Python values that `values` describes.
"""
