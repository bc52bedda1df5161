-- The answer of tx/lock_all.sql for a lock that is held: for drivers that tell the
-- number of rows of the last of several statements only.
SELECT pg_catalog.generate_series(1,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN 3
            WHEN pg_catalog.starts_with(pg_catalog.current_setting('transaction_isolation'), 'read ') THEN 1
            ELSE 2 END)
