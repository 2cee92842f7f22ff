"""The second step: appends the messages of a slot to the change log, and confirms them when they are durable.

`ready` makes the slot ready. `drain` reads the slot up to an LSN by SQL, and `follow` reads it by the streaming
protocol.
"""
