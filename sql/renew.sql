-- Renews each lease of a batch; one row per entry, in order:
--   renewed
--   gone     expired, released or taken over
--   skipped  its row is locked by somebody: to be tried again alone
-- The rows are locked first, in one order and without waiting, so that a row
-- which somebody keeps locked costs no other lease its renewal.
-- $1 names, $2 holders, $3 tokens, $4 ttls in milliseconds
WITH want AS MATERIALIZED (
  SELECT w.name, w.holder, w.token, w.ttl::float8 * interval '1 millisecond' AS ttl, w.n
    FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[]) WITH ORDINALITY AS w (name, holder, token, ttl, n)
), locked AS MATERIALIZED (
  SELECT w.n, w.name, w.ttl
    FROM want w
    JOIN /* schema */distributed_locks l ON l.lock_name::text = w.name COLLATE "C"
   WHERE l.holder_id::text = w.holder COLLATE "C" AND l.fencing_token = w.token AND l.expires_at > clock_timestamp()
   ORDER BY l.lock_name::text COLLATE "C"
     FOR NO KEY UPDATE OF l SKIP LOCKED
), renewed AS (
  UPDATE /* schema */distributed_locks l
     SET expires_at = clock_timestamp() + k.ttl
    FROM locked k
   WHERE l.lock_name::text = k.name COLLATE "C"
  RETURNING k.n
)
SELECT CASE WHEN r.n IS NOT NULL THEN 'renewed'
            WHEN EXISTS (SELECT FROM /* schema */distributed_locks l
                          WHERE l.lock_name::text = w.name COLLATE "C" AND l.holder_id::text = w.holder COLLATE "C"
                            AND l.fencing_token = w.token AND l.expires_at > clock_timestamp()) THEN 'skipped'
            ELSE 'gone' END
  FROM want w LEFT JOIN renewed r ON r.n = w.n
 ORDER BY w.n
