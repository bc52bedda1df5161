-- Gives back each lease of a batch; one row per entry, in order:
--   released  it was still live
--   expired   its row was there, but it had lapsed
--   gone      it was released before, or somebody has taken it over
--   skipped   a transaction that fenced it is open, or its row is locked by
--             somebody: to be tried again
-- $1 names, $2 holders, $3 tokens (NULL: whichever the holder has)
WITH want AS MATERIALIZED (
  SELECT w.name, w.holder, w.token, w.n
    FROM unnest($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS w (name, holder, token, n)
), mine AS MATERIALIZED (
  SELECT w.n, w.name, w.holder, w.token
    FROM want w
    JOIN /* schema */distributed_locks l ON l.lock_name::text = w.name COLLATE "C"
   WHERE l.holder_id::text = w.holder COLLATE "C" AND l.fencing_token = coalesce(w.token, l.fencing_token)
   ORDER BY l.lock_name::text COLLATE "C"
), pinned AS MATERIALIZED (
  SELECT m.n, m.name, m.holder, m.token FROM mine m WHERE pg_try_advisory_xact_lock(/* schema */pgxlock_key('pin', m.name))
), locked AS MATERIALIZED (
  SELECT p.n, p.name
    FROM pinned p
    JOIN /* schema */distributed_locks l ON l.lock_name::text = p.name COLLATE "C"
   WHERE l.holder_id::text = p.holder COLLATE "C" AND l.fencing_token = coalesce(p.token, l.fencing_token)
   ORDER BY l.lock_name::text COLLATE "C"
     FOR UPDATE OF l SKIP LOCKED
), removed AS (
  DELETE FROM /* schema */distributed_locks l
   USING locked k
   WHERE l.lock_name::text = k.name COLLATE "C"
  RETURNING k.n, l.expires_at > clock_timestamp() AS live
)
SELECT CASE WHEN r.live THEN 'released'
            WHEN r.n IS NOT NULL THEN 'expired'
            WHEN m.n IS NOT NULL THEN 'skipped'
            ELSE 'gone' END
  FROM want w LEFT JOIN mine m ON m.n = w.n LEFT JOIN removed r ON r.n = w.n
 ORDER BY w.n
