-- Gives a block its arguments: a DO block has no parameters.
-- $1 keys, $2 what to do with each, as in tx/lock_all.sql, $3 milliseconds
SELECT pg_catalog.set_config('pgxlock.keys', $1::bigint[]::text, true),
       pg_catalog.set_config('pgxlock.whats', $2::int[]::text, true),
       pg_catalog.set_config('pgxlock.milliseconds', $3::bigint::text, true)
