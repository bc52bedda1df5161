-- Removes tickets.
-- $1 kinds, $2 names, $3 numbers
SELECT /* schema */pgxlock_withdraw_batch($1::integer[], $2::text[], $3::bigint[])
