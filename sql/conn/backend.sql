-- Whether the server is a standby, which is no place to lock. Which backend serves
-- this connection, and since when (0: this role may not know). Another pid than the
-- one the server announced at connect means a pooler in between. Also whether the
-- role's transactions are as ours must be, and whether conn/worker.sql is to be asked.
SELECT pg_catalog.pg_is_in_recovery(),
       pg_catalog.pg_backend_pid(),
       coalesce((SELECT (pg_catalog.extract('epoch', a.backend_start) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8
                   FROM pg_catalog.pg_stat_activity a WHERE a.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()), 0),
       pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'
       AND pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'off',
       pg_catalog.to_regclass('pg_catalog.pg_dist_local_group') IS NOT NULL
