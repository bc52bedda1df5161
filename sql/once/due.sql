-- Which slots of a key may be started: of those before the current one the ones that
-- were missed, oldest first, and the current one, with how long it lasts yet in
-- microseconds. other_period and what follows it: as start.sql has them.
-- $1 key, $2 period and $3 offset in seconds, $4 time zone, $5 how many before,
-- $6 whether what failed may be started again, $7 what a first start does: now or next
SELECT d.slot, d.due, d.lasts,
       extract(epoch FROM d.other_period)::float8, extract(epoch FROM d.other_offset)::float8, d.other_zone
  FROM /* schema */pgxlock_due_runs($1::text, pg_catalog.make_interval(secs => $2::float8),
                                    pg_catalog.make_interval(secs => $3::float8), $4::text, $5::integer, $6::boolean, $7::text) d
 ORDER BY d.slot
