"""The places where a lake's files are: folders and object stores, with their options.

`storage` interprets the address of a lake. `store` reads and writes files there. `store_errors` interprets the
errors of an object store.
"""
