"""Where a lake's files are: folders and object stores, with their options.

`storage` interprets an address, `store` reads and writes files there, and `store_errors` explains a store's
errors.
"""
