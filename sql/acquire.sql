-- Tries to take each lease of a batch; one row per entry, in order.
-- $1 names, $2 holders, $3 ttls in milliseconds, $4 metadata as JSON (NULL for none)
SELECT t.acquired, t.fencing_token, t.held_by, (extract(epoch FROM t.remaining) * 1000)::bigint AS remaining_ms
  FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[]) WITH ORDINALITY AS w (name, holder, ttl, metadata, n),
       LATERAL /* schema */try_acquire_lock(w.name, w.holder, w.ttl::float8 * interval '1 millisecond', w.metadata::jsonb) AS t
 ORDER BY w.n
