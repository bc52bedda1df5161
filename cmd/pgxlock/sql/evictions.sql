-- The last evictions, the latest first. A name is known behind the number of an advisory lock if it is recorded, or a
-- Locker published it.
-- The application is that of the session that had an advisory lock, as long as it lives: a later session with
-- its process id began after the eviction.
-- All is qualified, so that psql runs it with any search_path.
-- $1 how many (NULL: all), $2 seconds since then, at most (NULL: any)
SELECT e.kind, coalesce(e.key_name, n.name, e.name) AS name, coalesce(e.key_name, n.name) IS NOT NULL AS named, e.holder, e.evicted_at, e.evicted_by, e.reason,
       coalesce(a.application_name, '') AS application
  FROM /* schema */pgxlock_evictions e
  LEFT JOIN /* schema */pgxlock_names n ON e.kind OPERATOR(pg_catalog.=) 1 AND e.name OPERATOR(pg_catalog.=) n.key_id::pg_catalog.text COLLATE pg_catalog."C"
  LEFT JOIN pg_catalog.pg_stat_activity a
    ON e.kind OPERATOR(pg_catalog.<>) 0 AND a.pid::pg_catalog.text OPERATOR(pg_catalog.=) pg_catalog.split_part(e.holder, ':', 2) COLLATE pg_catalog."default"
   AND a.backend_start OPERATOR(pg_catalog.<) e.evicted_at
 WHERE $2::pg_catalog.float8 IS NULL
    OR e.evicted_at OPERATOR(pg_catalog.>=) (pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) pg_catalog.make_interval(secs => $2::pg_catalog.float8))
 ORDER BY e.evicted_at DESC
 LIMIT $1::pg_catalog.int8
