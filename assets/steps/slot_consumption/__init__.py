"""The second step: a slot's messages become the change log, and are confirmed once they are durable.

`drain` reads up to an LSN by SQL, `follow` as they arrive; `slot` keeps the slot and its position in order.
"""
