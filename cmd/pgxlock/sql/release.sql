-- Gives a lease back; false if it had lapsed.
-- $1 name, $2 holder, $3 token
SELECT /* schema */release_lock_fenced($1, $2, $3)
