-- Pins a share of a lease for the caller's transaction; an expired one will do if
-- nobody took the lease, because nobody can take it from now on.
-- The types are those of the function: it is beaten by no overload that another role makes.
-- $1 name, $2 holder, $3 token
SELECT /* schema */assert_shared_lock_held($1::pg_catalog.varchar, $2::pg_catalog.varchar, $3::pg_catalog.int8, true)
