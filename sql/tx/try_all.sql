-- tx/try_lock.sql for many keys; 0 if one of them was refused, others may have been
-- granted then. Run it in a savepoint.
-- $1 keys, $2 what to do with each
SELECT pg_catalog.generate_series(1,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN 3
            WHEN NOT (SELECT pg_catalog.bool_and(CASE k.what WHEN 0 THEN pg_catalog.pg_try_advisory_xact_lock(k.key)
                                                            WHEN 1 THEN pg_catalog.pg_try_advisory_xact_lock_shared(k.key)
                                                            WHEN 4 THEN pg_catalog.pg_try_advisory_xact_lock((k.key >> 32)::int, (k.key << 32 >> 32)::int)
                                                            WHEN 5 THEN pg_catalog.pg_try_advisory_xact_lock_shared((k.key >> 32)::int, (k.key << 32 >> 32)::int) END)
                        FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::int[])) AS k (key, what)) THEN 0
            WHEN pg_catalog.starts_with(pg_catalog.current_setting('transaction_isolation'), 'read ') THEN 1
            ELSE 2 END)
