-- Gives back each share of a batch; one row per entry, in order: released (it was
-- live, and the last one), left (it was live, and others are), expired (it had
-- lapsed), gone (released before, or taken over), or skipped (to be tried again: it is
-- fenced, or somebody is just changing the group). Whether anybody waits is not looked at.
-- $1 names, $2 holders, $3 tokens (NULL: whichever the holder has)
SELECT r.outcome, false
  FROM /* schema */pgxlock_release_shares_batch($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS r (outcome, n)
 ORDER BY r.n
