-- Gives back each lease of a batch; one row per entry, in order: what became of it, as
-- release.sql says, and whether anybody waits for it.
-- $1 names, $2 holders, $3 tokens (NULL: whichever the holder has)
SELECT r.outcome, r.wanted
  FROM /* schema */pgxlock_give_back_batch($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS r (outcome, wanted, n)
 ORDER BY r.n
