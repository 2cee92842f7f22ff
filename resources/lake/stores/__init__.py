"""The places of a lake's files: folders and object stores, with their options.

`storage` interprets an address, `store` reads and writes files there, and `store_errors` interprets a store's
errors.
"""
