-- Gives a lease back; false if it had lapsed.
-- $1 name, $2 holder, $3 token
SELECT /* schema */release_lock_fenced($1::pg_catalog.varchar, $2::pg_catalog.varchar, $3::pg_catalog.int8)
