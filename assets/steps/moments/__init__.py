"""A subscription's replicas as they were at any moment: at a cut, or at a cut plus later changes.

`moment` turns a time into an LSN. `bases` finds the version and the changes for each table. `reading` makes tables of
them by the apply's own functions, in a temporary folder; `restore` makes permanent ones. No replica is written to.
"""
