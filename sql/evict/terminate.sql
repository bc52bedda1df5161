-- Makes sure that a backend whose connection broke does nothing any more. A busy machine may take
-- seconds to end it.
-- $1 pid, $2 backend_start as backend.sql says it
SELECT pg_terminate_backend(a.pid, 4000)
  FROM pg_stat_activity a
 WHERE a.pid = $1::integer AND (extract(epoch FROM a.backend_start) * 1000000)::bigint = $2::bigint
