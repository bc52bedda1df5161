-- Wakes, for each lock, the first who waits for it, or the one behind that ticket if it
-- slept through its turn; one row per ticket that was woken: for which entry, counted
-- from 1, and its number.
-- $1 kinds, $2 names, $3 tickets (NULL: the first)
SELECT w.n, w.woken_ticket
  FROM /* schema */pgxlock_wake_batch($1::integer[], $2::text[], $3::bigint[]) w
