"""The steps of replication, in one folder each: functions that use resources, but not Dagster.

Each step reads what the step before has written durably. `records` has the tables that several steps read and write.
"""
