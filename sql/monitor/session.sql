-- A session that has advisory locks: whose it is, and since when, in microseconds since
-- 1970 as backend.sql says it; 0: this role may not know.
-- $1 pid
SELECT coalesce((pg_catalog.extract('epoch', a.backend_start) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8, 0),
       coalesce(a.application_name, ''), coalesce(a.usename::pg_catalog.text, ''), coalesce(pg_catalog.host(a.client_addr), '')
  FROM pg_catalog.pg_stat_activity a
 WHERE a.pid OPERATOR(pg_catalog.=) $1::pg_catalog.int4 AND a.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
