-- Which backend serves this connection. Another pid than the one the server
-- announced at connect means a pooler in between.
SELECT pg_backend_pid(), (SELECT a.backend_start FROM pg_stat_activity a WHERE a.pid = pg_backend_pid())
