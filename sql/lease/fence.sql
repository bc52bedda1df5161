-- Pins a lease for the caller's transaction; an expired one that nobody took
-- will do, because nobody can take it from now on.
-- $1 name, $2 holder, $3 token
SELECT /* schema */assert_lock_held($1, $2, $3, true)
