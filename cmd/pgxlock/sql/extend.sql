-- Renews a lease; NULL if it is lost.
-- $1 name, $2 holder, $3 token, $4 seconds
SELECT /* schema */renew_lock($1::pg_catalog.varchar, $2::pg_catalog.varchar, $3::pg_catalog.int8, pg_catalog.make_interval(secs => $4::pg_catalog.float8))
