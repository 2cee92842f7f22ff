"""The replicas of a subscription as they were at any moment: at a cut, or at a cut plus later changes.

A cut names a version of each replica of a subscription; together these versions equal the publisher at one LSN.

- `moment` converts a time to an LSN
- `bases` finds for each table a version of its replica, and the changes after this version
- `reading` applies these changes to clones in a temporary folder, by the functions that apply changes to replicas
- `restore` makes permanent tables

The replicas themselves are only read.
"""
