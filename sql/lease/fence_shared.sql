-- Pins a share of a lease for the caller's transaction; an expired one will do if
-- nobody took the lease, because nobody can take it from now on.
-- $1 name, $2 holder, $3 token
SELECT /* schema */assert_shared_lock_held($1, $2, $3, true)
