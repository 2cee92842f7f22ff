"""The steps of replication, one folder each: functions over resources, without Dagster.

Each step reads the durable output of the step before. `records` has the tables that several steps read and write.
"""
