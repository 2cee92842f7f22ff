"""A subscription's replicas as they were at any moment: a cut, or a cut and the changes up to there.

`moment` says which LSN a time is, `bases` from which versions and changes each table comes, `reading` makes tables of them by the
apply's own functions, in a folder beside the lake; `restore` puts them somewhere to stay. No replica is written to.
"""
