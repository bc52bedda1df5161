-- Ends claims, and returns how many.
-- $1 seconds that they must be old, $2 how many at most
SELECT /* schema */purge_claims(pg_catalog.make_interval(secs => $1::float8), $2::integer)
