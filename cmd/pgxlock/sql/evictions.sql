-- The last evictions, the latest first. A name is known behind the number of an advisory lock if it is recorded, or a
-- Locker published it.
-- All is qualified, so that psql runs it with any search_path.
-- $1 how many (NULL: all), $2 seconds since then, at most (NULL: any)
SELECT e.kind, coalesce(e.key_name, n.name, e.name) AS name, coalesce(e.key_name, n.name) IS NOT NULL AS named, e.holder, e.evicted_at, e.evicted_by, e.reason
  FROM /* schema */pgxlock_evictions e
  LEFT JOIN /* schema */pgxlock_names n ON e.kind OPERATOR(pg_catalog.=) 1 AND e.name OPERATOR(pg_catalog.=) n.key_id::pg_catalog.text COLLATE pg_catalog."C"
 WHERE $2::pg_catalog.float8 IS NULL
    OR e.evicted_at OPERATOR(pg_catalog.>=) (pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) pg_catalog.make_interval(secs => $2::pg_catalog.float8))
 ORDER BY e.evicted_at DESC
 LIMIT $1::pg_catalog.int8
