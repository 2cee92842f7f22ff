"""Finds problems of a subscription before anything is created, and decides which part has to wait.

`examination` examines the publisher once and names every problem. `waiting` limits a problem
to its table, or its subscription.
"""
