"""Finds problems of a subscription before anything is created, and decides what has to wait for each.

`examination` examines the publisher once and names every problem. `waiting` decides what continues: a problem
stops its table, or its subscription, and nothing else.
"""
