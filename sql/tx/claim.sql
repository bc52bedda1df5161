-- Claims a key for the caller's transaction. The number of rows is the answer: 0 while another
-- one's claim is undecided, 1 claimed, 2 another one's claim has committed.
-- $1 key, $2 seconds to wait (NULL: no bound), $3 seconds to keep (NULL: for good)
SELECT pg_catalog.generate_series(1, CASE WHEN c.claimed THEN 1 WHEN NOT c.claimed THEN 2 ELSE 0 END)
  FROM /* schema */claim_once($1::text, pg_catalog.make_interval(secs => $2::float8),
                              pg_catalog.make_interval(secs => $3::float8)) AS c (claimed)
