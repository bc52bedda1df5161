-- Gives back each lease of a batch; one letter per entry, in order: r released (it was
-- still live), e expired (it had lapsed), g gone (released before, or taken over), s
-- skipped (to be tried again: it is fenced, or its row is locked); in upper case if
-- anybody waits for it.
-- $1 names, $2 holders, $3 tokens (NULL: whichever the holder has)
SELECT /* schema */pgxlock_release_batch($1::text[], $2::text[], $3::bigint[])
