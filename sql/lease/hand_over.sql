-- Gives back one lease, as release_one.sql does, and if that succeeds takes it for the next
-- holder, as acquire_one.sql does, in the same commit.
-- $1 name, $2 holder, $3 its token, $4 next holder, $5 TTL in ms, $6 metadata
SELECT r.outcome, t.token, t.held_by, t.remaining_ms, t.ahead
  FROM /* schema */pgxlock_release_one($1::text, $2::text, $3::bigint) AS r (outcome)
  LEFT JOIN LATERAL (SELECT a.token, a.held_by, a.remaining_ms, a.ahead
                       FROM /* schema */pgxlock_acquire_one($1::text, $4::text, $5::bigint, $6::text, NULL::bigint) AS a
                      WHERE r.outcome OPERATOR(pg_catalog.=) ANY ('{r,R,e,E}'::text[])
                     OFFSET 0) AS t ON true
