-- Tries to take one lease, as acquire.sql does each of a batch: values in place of arrays.
SELECT t.token, t.held_by, t.remaining_ms, t.ahead
  FROM /* schema */pgxlock_acquire_one($1::text, $2::text, $3::bigint, $4::text, $5::bigint) AS t
