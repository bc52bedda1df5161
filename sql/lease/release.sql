-- Gives back each lease of a batch; one row per entry, in order: released (it was still
-- live), expired (it had lapsed), gone (released before, or taken over), or skipped (to be
-- tried again: it is fenced, or its row is locked); and whether anybody waits for it.
-- $1 names, $2 holders, $3 tokens (NULL: whichever the holder has)
SELECT r.outcome, r.wanted
  FROM /* schema */pgxlock_release_batch($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS r (outcome, wanted, n)
 ORDER BY r.n
