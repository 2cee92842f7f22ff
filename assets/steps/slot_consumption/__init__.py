"""The second step: a slot's messages become the change log, and are confirmed once they are durable.

`ready` makes the slot ready. `drain` reads it up to an LSN by SQL. `follow` reads it by the streaming protocol.
"""
