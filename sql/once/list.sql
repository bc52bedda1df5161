-- The runs that are recorded, the latest first.
-- $1 key (NULL: all), $2 how many at most
SELECT r.run_key, r.slot, r.state, r.attempt, r.holder, r.lease IS NOT NULL, r.started_at, r.finished_at, coalesce(r.error, ''),
       coalesce(extract(epoch FROM r.period), 0)::float8, coalesce(extract(epoch FROM r.period_offset), 0)::float8,
       coalesce(r.time_zone, '')
  FROM /* schema */list_runs($1::text, $2::integer) r
