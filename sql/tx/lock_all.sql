-- Takes advisory locks for the caller's transaction, one after the other in the order
-- given, and waits for them. The number of rows is the answer: 1 granted, 2 granted to
-- a transaction that keeps its snapshot, 3 nothing: a standby.
-- $1 keys, $2 what to do with each, as in advisory/prepare.sql: 0 exclusive, 1 shared,
-- 4 and 5 the same for a key of two ints, the first of which is its upper half
SELECT pg_catalog.generate_series(1,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN 3
            WHEN (SELECT pg_catalog.count(
                           CASE k.what
                             WHEN 0 THEN pg_catalog.pg_advisory_xact_lock(k.key)
                             WHEN 1 THEN pg_catalog.pg_advisory_xact_lock_shared(k.key)
                             WHEN 4 THEN pg_catalog.pg_advisory_xact_lock((k.key >> 32)::int, (k.key << 32 >> 32)::int)
                             WHEN 5 THEN pg_catalog.pg_advisory_xact_lock_shared((k.key >> 32)::int, (k.key << 32 >> 32)::int)
                           END)
                    FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::int[])) AS k (key, what)) IS NULL
            THEN 0
            WHEN pg_catalog.starts_with(pg_catalog.current_setting('transaction_isolation'), 'read ') THEN 1
            ELSE 2 END)
