-- Tries to take a lease.
-- $1 name, $2 holder, $3 seconds, $4 metadata as JSON
SELECT acquired, coalesce(fencing_token, 0) AS token, coalesce(held_by::text, '') AS held_by, expires_at,
       coalesce(extract(epoch FROM remaining)::float8, 0) AS remaining_seconds
  FROM /* schema */try_acquire_lock($1, $2, pg_catalog.make_interval(secs => $3::float8), $4::jsonb)
