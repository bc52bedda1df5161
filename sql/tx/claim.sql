-- Claims a key for the caller's transaction; NULL while another one's claim is
-- undecided.
-- $1 key, $2 seconds to wait (NULL: no bound), $3 seconds to keep (NULL: for good)
SELECT /* schema */claim_once($1::text, pg_catalog.make_interval(secs => $2::float8),
                              pg_catalog.make_interval(secs => $3::float8))
