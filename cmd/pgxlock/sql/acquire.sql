-- Tries to take a lease.
-- $1 name, $2 holder, $3 seconds, $4 metadata as JSON
SELECT acquired, coalesce(fencing_token, 0) AS token, coalesce(held_by::pg_catalog.text, '') AS held_by, expires_at,
       coalesce(extract(epoch FROM remaining)::pg_catalog.float8, 0) AS remaining_seconds
  FROM /* schema */try_acquire_lock($1::pg_catalog.varchar, $2::pg_catalog.varchar, pg_catalog.make_interval(secs => $3::pg_catalog.float8), $4::pg_catalog.jsonb)
