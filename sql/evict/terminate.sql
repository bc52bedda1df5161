-- Makes sure that a backend whose connection broke does nothing any more.
-- $1 pid, $2 backend_start as backend.sql says it
SELECT pg_terminate_backend(a.pid, 1000)
  FROM pg_stat_activity a
 WHERE a.pid = $1::integer AND (extract(epoch FROM a.backend_start) * 1000000)::bigint = $2::bigint
