-- Tries to take permits of each semaphore of a batch, in turn, for each entry as many as it wants or
-- none; one row of arrays, as acquire.sql, with two more: the permit, and how many permits others use,
-- if another number. They have an element for each permit that is wanted.
-- $1 the queues of those who wait: names with #, $2 holders, $3 ttls in milliseconds,
-- $4 metadata as JSON (NULL for none), $5 tickets as for acquire.sql, $6 permits,
-- $7 how many are wanted
SELECT pg_catalog.array_agg(CASE WHEN t.acquired THEN t.fencing_token END ORDER BY t.n),
       pg_catalog.array_agg(t.held_by ORDER BY t.n),
       pg_catalog.array_agg(t.remaining_ms ORDER BY t.n), pg_catalog.array_agg(t.ahead ORDER BY t.n),
       pg_catalog.array_agg(t.permit ORDER BY t.n), pg_catalog.array_agg(t.others ORDER BY t.n)
  FROM /* schema */pgxlock_permit_batch(ARRAY(SELECT pg_catalog.left(q.name, -1)
                                                FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS q (name, n)
                                               ORDER BY q.n),
         $6::integer[], $2::text[], $3::bigint[], $4::text[], $5::bigint[], $7::integer[])
       WITH ORDINALITY AS t (acquired, fencing_token, held_by, remaining_ms, ahead, permit, others, n)
