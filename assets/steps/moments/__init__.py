"""A subscription's replicas as they were at any moment: at a cut, or at a cut plus later changes.

A cut is a version of each replica of a subscription, so that together they equal the publisher at one LSN.
`moment` turns a time into an LSN. `bases` finds a version and the changes after it for each table. `reading` applies
these changes to clones in a temporary folder, by the functions of the apply; `restore` makes permanent tables. The
replicas are only read.
"""
