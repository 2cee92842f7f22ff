"""The first step: tables are copied at one exported snapshot, their row filters evaluated by the publisher.

`copy` decides and commits, `rows` runs on executors. A replica that cannot be read is set aside first.
"""
