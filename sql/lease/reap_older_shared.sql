-- Removes some of the shares that expired longer ago than that; how many.
-- $1 seconds, $2 how many at most
SELECT /* schema */pgxlock_reap_shares(make_interval(secs => $1::float8), $2::integer)
