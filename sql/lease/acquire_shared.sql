-- Tries to share each lease of a batch, in turn; one row of arrays, as acquire.sql.
-- $1 names, $2 holders, $3 ttls in milliseconds, $4 metadata as JSON (NULL for none),
-- $5 tickets, as in acquire.sql
SELECT pg_catalog.array_agg(CASE WHEN t.acquired THEN t.fencing_token END ORDER BY t.n),
       pg_catalog.array_agg(t.held_by ORDER BY t.n),
       pg_catalog.array_agg(t.remaining_ms ORDER BY t.n), pg_catalog.array_agg(t.ahead ORDER BY t.n)
  FROM /* schema */pgxlock_try_in_turn($1::text[], $2::text[], $3::bigint[], $4::text[], $5::bigint[], true)
       WITH ORDINALITY AS t (acquired, fencing_token, held_by, remaining_ms, ahead, n)
