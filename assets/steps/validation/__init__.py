"""Finds the problems of a subscription before anything is created, and decides which tables have to wait.

`examination` examines the publisher once, and finds all problems. `waiting` makes sure that a problem only affects its
table or its subscription.
"""
