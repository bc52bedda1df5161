-- The functions that the lock session calls by their numbers, in the order of what
-- advisory/prepare.sql knows them by.
SELECT f::pg_catalog.regprocedure::pg_catalog.oid
  FROM pg_catalog.unnest('{
    "pg_catalog.pg_try_advisory_lock(bigint)", "pg_catalog.pg_try_advisory_lock_shared(bigint)",
    "pg_catalog.pg_advisory_unlock(bigint)", "pg_catalog.pg_advisory_unlock_shared(bigint)",
    "pg_catalog.pg_try_advisory_lock(int, int)", "pg_catalog.pg_try_advisory_lock_shared(int, int)",
    "pg_catalog.pg_advisory_unlock(int, int)", "pg_catalog.pg_advisory_unlock_shared(int, int)"}'::pg_catalog.text[]) f
