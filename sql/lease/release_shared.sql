-- Gives back each share of a batch; one letter per entry, in order: r released (it was
-- live, and the last one), l left (it was live, and others are), e expired (it had
-- lapsed), g gone (released before, or taken over), s skipped (to be tried again: it is
-- fenced, or somebody is just changing the group). Whether anybody waits is not looked at.
-- $1 names, $2 holders, $3 tokens (NULL: whichever the holder has)
SELECT pg_catalog.string_agg(pg_catalog.left(r.outcome, 1), '' ORDER BY r.n)
  FROM /* schema */pgxlock_release_shares_batch($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS r (outcome, n)
