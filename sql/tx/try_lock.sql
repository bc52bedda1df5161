-- Takes an advisory lock for the caller's transaction without waiting. The number
-- of rows is the answer: 0 refused, else as in tx/lock_all.sql.
-- $1 key, $2 what as in tx/lock_all.sql
SELECT pg_catalog.generate_series(1,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN 3
            WHEN NOT CASE $2::int
              WHEN 0 THEN pg_catalog.pg_try_advisory_xact_lock($1::bigint)
              WHEN 1 THEN pg_catalog.pg_try_advisory_xact_lock_shared($1::bigint)
              WHEN 4 THEN pg_catalog.pg_try_advisory_xact_lock(($1::bigint >> 32)::int, ($1::bigint << 32 >> 32)::int)
              WHEN 5 THEN pg_catalog.pg_try_advisory_xact_lock_shared(($1::bigint >> 32)::int, ($1::bigint << 32 >> 32)::int) END
            THEN 0
            WHEN pg_catalog.starts_with(pg_catalog.current_setting('transaction_isolation'), 'read ') THEN 1
            ELSE 2 END)
