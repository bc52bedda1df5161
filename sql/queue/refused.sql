-- Says that tickets were refused advisory locks: they have tried, and keep
-- their precedence.
-- $1 kinds, $2 names, $3 numbers
SELECT /* schema */pgxlock_refused_batch($1::integer[], $2::text[], $3::bigint[])
