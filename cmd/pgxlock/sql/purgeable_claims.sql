-- How many claims purge_claims() would remove, as it chooses them. The search_path is the role's, so
-- that all is qualified.
-- $1 seconds that those without a retention must be old
SELECT pg_catalog.count(*)
  FROM /* schema */pgxlock_claims c
 WHERE c.expires_at OPERATOR(pg_catalog.<=) pg_catalog.clock_timestamp()
    OR c.expires_at IS NULL AND c.claimed_at OPERATOR(pg_catalog.<=) (pg_catalog.clock_timestamp()
         OPERATOR(pg_catalog.-) least(pg_catalog.make_interval(secs => $1::pg_catalog.float8), '1000 years'::pg_catalog.interval))
