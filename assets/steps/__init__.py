"""The steps of replication, one folder each: functions over resources, without Dagster.

Each step reads what the step before made durable. `records` has the tables that several steps read and write.
"""
