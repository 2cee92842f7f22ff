"""Finds the problems of a subscription before anything is created, and decides which tables have to wait.

`examination` examines the publisher once, and finds all problems. `waiting` limits the effect of a problem to its table
or its subscription.
"""
