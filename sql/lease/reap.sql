-- Removes some of the leases, permits and shares that expired longer ago than that; how many.
-- $1 seconds, $2 how many of leases, and of shares, at most
SELECT /* schema */reap_expired_locks(make_interval(secs => $1::float8), $2::integer)
     + /* schema */pgxlock_reap_shares(make_interval(secs => $1::float8), $2::integer)
