-- The last evictions, the latest first. A name is known behind the number of an advisory lock if a Locker published it.
-- $1 how many (NULL: all), $2 seconds since then, at most (NULL: any)
SELECT e.kind, coalesce(n.name, e.name) AS name, n.name IS NOT NULL AS named, e.holder, e.evicted_at, e.evicted_by, e.reason
  FROM /* schema */pgxlock_evictions e
  LEFT JOIN /* schema */pgxlock_names n ON e.kind = 1 AND e.name = n.key_id::text COLLATE "C"
 WHERE $2::float8 IS NULL OR e.evicted_at >= clock_timestamp() - make_interval(secs => $2::float8)
 ORDER BY e.evicted_at DESC
 LIMIT $1::bigint
