-- Tries to take each lease of a batch, where there is no queue of who waits; one row
-- per entry, in order.
-- $1 names, $2 holders, $3 ttls in milliseconds, $4 metadata as JSON (NULL for none)
SELECT t.acquired, t.fencing_token, t.held_by, t.remaining_ms, false
  FROM /* schema */pgxlock_acquire_batch($1::text[], $2::text[], $3::bigint[], $4::text[]) WITH ORDINALITY AS t (acquired, fencing_token, held_by, remaining_ms, n)
 ORDER BY t.n
