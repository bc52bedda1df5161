-- Removes some of the leases that expired longer ago than that; how many.
-- $1 seconds, $2 how many at most
SELECT /* schema */reap_expired_locks(make_interval(secs => $1::float8), $2::integer)
