-- Asks a session to give back an advisory lock; false if it does not have it.
-- $1 pid, $2 key, $3 why, $4 its space, $5 its name (NULL: none is known)
SELECT /* schema */evict_advisory_lock($1::integer, $2::bigint, $3::text, $4::integer, $5::text)
