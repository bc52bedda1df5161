-- Tries to take each lease of a batch, in turn; one row of arrays with an element per
-- entry, in order: the token, NULL if it was refused; who has the lease, for how many
-- milliseconds, and whether a waiter comes first, all three NULL if all were simply free.
-- $1 names, $2 holders, $3 ttls in milliseconds, $4 metadata as JSON (NULL for none),
-- $5 tickets: a waiter has one, or 0, and passes no earlier waiter; NULL: does
-- not wait, and does not check whether others do
SELECT t.tokens, t.held_by, t.remaining_ms, t.ahead
  FROM /* schema */pgxlock_acquire_batch($1::text[], $2::text[], $3::bigint[], $4::text[], $5::bigint[]) AS t
