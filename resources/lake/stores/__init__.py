"""Where a lake's files are: folders and object stores, with their options.

`storage` says what an address stands for, `store` reads and writes files there, `store_errors` names what a store refuses.
"""
