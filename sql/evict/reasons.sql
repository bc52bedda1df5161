-- Which of these holdings were evicted: of which entry, counted from 1, by whom, why, and
-- how many milliseconds ago.
-- $1 kinds, $2 names, $3 holders, $4 tokens
SELECT e.n, e.evicted_by, e.reason, e.ms FROM /* schema */pgxlock_evicted($1::integer[], $2::text[], $3::text[], $4::bigint[]) e
