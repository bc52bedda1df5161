-- Starts a run, if attempt is not NULL. other_period and what follows it: with which period, offset
-- and time zone another program has started a run near it; NULL: none does; 0: for a tick.
-- $1 key, $2 tick or slot, or NULL for the current slot, of $3 period (NULL: a tick) and $4 offset
-- in seconds and $5 time zone, $6 seconds to keep what is known of it, $7 holder, $8 the lease
-- that it has (NULL: none, so that it is started once), $9 what a first start does: now or next
SELECT s.slot, s.attempt, extract(epoch FROM s.other_period)::float8, extract(epoch FROM s.other_offset)::float8, s.other_zone
  FROM /* schema */pgxlock_start_run($1::text, $2::timestamptz, pg_catalog.make_interval(secs => $3::float8),
                                     pg_catalog.make_interval(secs => $4::float8), $5::text,
                                     pg_catalog.make_interval(secs => $6::float8), $7::text, $8::text, $9::text) s
