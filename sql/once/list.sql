-- The runs that are recorded, the latest first. A role that may write the table can also write times that no
-- program can read, and texts of any length.
-- $1 key (NULL: all), $2 how many at most
SELECT r.run_key, r.slot, left(r.state, 255), r.attempt, left(r.holder, 300), r.lease IS NOT NULL,
       CASE WHEN r.started_at BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 00:00+00' THEN r.started_at ELSE r.slot END,
       CASE WHEN r.finished_at BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 00:00+00' THEN r.finished_at END,
       left(coalesce(r.error, ''), 2000),
       coalesce(extract(epoch FROM r.period), 0)::float8, coalesce(extract(epoch FROM r.period_offset), 0)::float8,
       left(coalesce(r.time_zone, ''), 255)
  FROM /* schema */list_runs($1::text, $2::integer) r
