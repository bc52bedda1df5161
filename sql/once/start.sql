-- Starts a run, if attempt is not NULL.
-- $1 key, $2 tick, or NULL for the current slot of $3 period and $4 offset in seconds
-- and $5 time zone, $6 seconds to keep what is known of it, $7 holder, $8 the lease that
-- it has (NULL: none, so that it is started once)
SELECT s.slot, s.attempt
  FROM /* schema */pgxlock_start_run($1::text, $2::timestamptz, pg_catalog.make_interval(secs => $3::float8),
                                     pg_catalog.make_interval(secs => $4::float8), $5::text,
                                     pg_catalog.make_interval(secs => $6::float8), $7::text, $8::text) s
