-- Leases, by name.
-- $1 what the name begins with ('' for all), $2 whether only those that are no longer live
SELECT l.lock_name::text AS name,
       l.state,
       l.holder_id::text AS holder,
       l.fencing_token AS token,
       l.acquired_at,
       l.expires_at,
       extract(epoch FROM l.held_for)::float8 AS held_seconds,
       extract(epoch FROM l.remaining)::float8 AS remaining_seconds,
       coalesce(l.metadata::text, '{}') AS metadata
  FROM /* schema */lock_leases l
 WHERE starts_with(l.lock_name::text, $1::text) AND (NOT $2::boolean OR l.state <> 'live')
 ORDER BY l.lock_name::text COLLATE "C"
