-- The leases, of those that are shared each of who shares them, with their last eviction: an evicted lease keeps its
-- token and loses its holder, an evicted share the other way round. What has expired was held until then.
-- $1 what the key begins with ('' for all), $2 what the holder id contains ('' for all), $3 states (NULL: all),
-- $4 seconds since it was acquired, more than (NULL: any), $5 seconds until a live one expires, at most (NULL: any),
-- $6 order: key, age or expiry, $7 how many (NULL: all)
SELECT l.lock_name::text AS key,
       'lease' AS kind,
       l.mode,
       l.state,
       l.holder_id::text AS holder,
       l.fencing_token AS token,
       CASE WHEN isfinite(l.acquired_at) THEN l.acquired_at ELSE '0001-01-01 00:00:00Z' END AS acquired_at,   -- what Go takes for no time
       CASE WHEN isfinite(l.expires_at) THEN l.expires_at ELSE '0001-01-01 00:00:00Z' END AS expires_at,
       extract(epoch FROM l.held_for + least(l.remaining, '0'))::float8 AS held_seconds,
       extract(epoch FROM l.remaining)::float8 AS remaining_seconds,
       coalesce(CASE WHEN l.metadata = '{}' THEN '' WHEN jsonb_typeof(l.metadata) = 'string' THEN l.metadata #>> '{}' ELSE l.metadata::text END, '') AS metadata,
       coalesce(e.evicted_by, '') AS evicted_by,
       coalesce(e.reason, '') AS eviction_reason
  FROM (SELECT 'exclusive' AS mode, a.* FROM /* schema */lock_leases a WHERE a.holder_id::text <> '*shared' COLLATE "C"
        UNION ALL
        SELECT 'shared', s.* FROM /* schema */lock_shares s) l
  LEFT JOIN LATERAL (SELECT v.evicted_by, v.reason FROM /* schema */pgxlock_evictions v
                      WHERE v.kind = 0 AND v.name = l.lock_name::text COLLATE "C"
                        AND CASE l.mode WHEN 'exclusive' THEN l.holder_id::text = '*evicted' COLLATE "C" AND v.token = l.fencing_token
                                        ELSE l.fencing_token = 0 AND v.holder = l.holder_id::text COLLATE "C" END
                      ORDER BY v.evicted_at DESC LIMIT 1) e ON true
 WHERE starts_with(l.lock_name::text, $1::text)
   AND strpos(l.holder_id::text COLLATE "C", $2::text) > 0
   AND ($3::text[] IS NULL OR l.state = ANY ($3::text[]))
   AND ($4::float8 IS NULL OR l.acquired_at < clock_timestamp() - make_interval(secs => $4::float8))
   AND ($5::float8 IS NULL OR l.state = 'live' AND l.expires_at <= clock_timestamp() + make_interval(secs => $5::float8))
 ORDER BY CASE $6::text WHEN 'age' THEN l.acquired_at WHEN 'expiry' THEN l.expires_at END, l.lock_name::text COLLATE "C"
 LIMIT $7::bigint
