-- How many claims purge_claims() would remove, as it chooses them.
-- $1 seconds that those without a retention must be old
SELECT count(*)
  FROM /* schema */pgxlock_claims c
 WHERE c.expires_at <= clock_timestamp()
    OR c.expires_at IS NULL AND c.claimed_at <= clock_timestamp() - least(make_interval(secs => $1::float8), interval '1000 years')
