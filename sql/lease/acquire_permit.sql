-- Tries to take a permit of each semaphore of a batch, in turn; one row per entry, in
-- order.
-- $1 the queues of those who wait: names with #, $2 holders, $3 ttls in milliseconds,
-- $4 metadata as JSON (NULL for none), $5 tickets as for take.sql, $6 permits
SELECT t.acquired, t.fencing_token, t.held_by, t.remaining_ms, t.ahead, t.permit, t.others
  FROM /* schema */pgxlock_permit_batch(ARRAY(SELECT pg_catalog.left(q.name, -1) FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS q (name, n) ORDER BY q.n),
         $6::integer[], $2::text[], $3::bigint[], $4::text[], $5::bigint[])
       WITH ORDINALITY AS t (acquired, fencing_token, held_by, remaining_ms, ahead, permit, others, n)
 ORDER BY t.n
