-- The answer to a request; NULL if the claim that had it has ended. tx/claim_request.sql says then
-- what became of the request: it may be the caller's transaction that has claimed it.
-- As tx/claim_request.sql: $1 key, $2 fingerprint, $3 seconds to wait, $4 seconds to keep
SELECT c.answer
  FROM /* schema */claim_request($1::text, $2::text, pg_catalog.make_interval(secs => $3::float8),
                                 pg_catalog.make_interval(secs => $4::float8)) AS c (outcome, answer)
