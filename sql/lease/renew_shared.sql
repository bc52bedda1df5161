-- Renews each share of a batch; one row per entry, in order: renewed, gone (expired,
-- released or taken over), or skipped (somebody is just changing the group: to be
-- tried again).
-- $1 names, $2 holders, $3 tokens, $4 ttls in milliseconds
SELECT r.outcome
  FROM /* schema */pgxlock_renew_shares_batch($1::text[], $2::text[], $3::bigint[], $4::bigint[])
       WITH ORDINALITY AS r (outcome, n)
 ORDER BY r.n
