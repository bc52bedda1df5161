-- A standby is no place to lock.
SELECT pg_catalog.pg_is_in_recovery()
