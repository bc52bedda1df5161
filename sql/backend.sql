-- Which backend serves this connection, and since when (0: this role may not
-- know). Another pid than the one the server announced at connect means a pooler
-- in between.
SELECT pg_backend_pid(),
       coalesce((SELECT (extract(epoch FROM a.backend_start) * 1000000)::bigint FROM pg_stat_activity a WHERE a.pid = pg_backend_pid()), 0)
