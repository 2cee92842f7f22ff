"""What is refused before anything is created, and who waits for it.

`examination` looks at the publisher once and names every problem. `waiting` says who goes on: a problem stops its table,
or its subscription, and nobody else.
"""
