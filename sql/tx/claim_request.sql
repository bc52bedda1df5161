-- Claims a request for the caller's transaction. The number of rows is the answer: 0 while another
-- one's claim is undecided, 1 claimed, 2 answered, 3 the claim is for another request.
-- $1 key, $2 fingerprint, $3 seconds to wait (NULL: no bound), $4 seconds to keep (NULL: for good)
SELECT pg_catalog.generate_series(1, coalesce(pg_catalog.array_position('{first,answered,other}'::text[], c.outcome), 0))
  FROM /* schema */claim_request($1::text, $2::text, pg_catalog.make_interval(secs => $3::float8),
                                 pg_catalog.make_interval(secs => $4::float8)) AS c (outcome, answer)
