-- The leases and permits, the first by name, and likewise who share the others. All of them, or,
-- after SET pgxlock.keys = '{order:42}', those of these names; after SET pgxlock.prefix = 'order:', those
-- whose name begins so; after SET pgxlock.states = 'live', or 'expired,abandoned', those in these states.
-- suspect: it began later than now, so that the server's clock was set back, and the
-- lease lasts longer than it should.
-- No caller can make this more than 200,000 rows, or as many as SET pgxlock.most says, and about 32 MiB:
-- left_out, in one row more than that, says that there are others. Of metadata the first 1,000 characters;
-- to read what is compressed or longer than 2,000 bytes takes long, so only of the first 1,000 of those,
-- and ... of others.
WITH f AS MATERIALIZED (
  SELECT coalesce(nullif(current_setting('pgxlock.most', true), '')::bigint, 200000) AS most,
         nullif(current_setting('pgxlock.keys', true), '')::text[] AS keys,
         coalesce(current_setting('pgxlock.prefix', true), '') AS prefix,
         string_to_array(nullif(current_setting('pgxlock.states', true), ''), ',') AS states
), found AS (                                -- by an index, and no more than is returned
  (SELECT l.lock_name::text AS name, false AS shared, l.holder_id::text AS holder, l.fencing_token AS token,
          l.metadata, l.state, l.acquired_at, l.expires_at
     FROM /* schema */lock_leases l
    WHERE l.holder_id::text <> '*shared' COLLATE "C" AND starts_with(l.lock_name::text, (SELECT f.prefix FROM f))
      AND ((SELECT f.states IS NULL FROM f) OR l.state = ANY ((SELECT f.states FROM f)::text[]))
    ORDER BY l.lock_name::text COLLATE "C" LIMIT (SELECT CASE WHEN f.keys IS NULL THEN f.most + 1 ELSE 0 END FROM f))
  UNION ALL
  (SELECT s.lock_name::text, true, s.holder_id::text, s.fencing_token, s.metadata, s.state, s.acquired_at, s.expires_at
     FROM /* schema */lock_shares s
    WHERE starts_with(s.lock_name::text, (SELECT f.prefix FROM f))
      AND ((SELECT f.states IS NULL FROM f) OR s.state = ANY ((SELECT f.states FROM f)::text[]))
    ORDER BY s.lock_name::text COLLATE "C" LIMIT (SELECT CASE WHEN f.keys IS NULL THEN f.most + 1 ELSE 0 END FROM f))
  UNION ALL
  (SELECT l.lock_name::text AS name, false AS shared, l.holder_id::text AS holder, l.fencing_token AS token,
          l.metadata, l.state, l.acquired_at, l.expires_at
     FROM /* schema */lock_leases l
    WHERE l.holder_id::text <> '*shared' COLLATE "C" AND l.lock_name::text = ANY ((SELECT f.keys FROM f)::text[] COLLATE "C")
      AND ((SELECT f.states IS NULL FROM f) OR l.state = ANY ((SELECT f.states FROM f)::text[]))
    ORDER BY l.lock_name::text COLLATE "C" LIMIT (SELECT f.most + 1 FROM f))
  UNION ALL
  (SELECT s.lock_name::text, true, s.holder_id::text, s.fencing_token, s.metadata, s.state, s.acquired_at, s.expires_at
     FROM /* schema */lock_shares s
    WHERE s.lock_name::text = ANY ((SELECT f.keys FROM f)::text[] COLLATE "C")
      AND ((SELECT f.states IS NULL FROM f) OR s.state = ANY ((SELECT f.states FROM f)::text[]))
    ORDER BY s.lock_name::text COLLATE "C" LIMIT (SELECT f.most + 1 FROM f))
)
SELECT l.name, l.shared, l.holder, l.token,
       CASE WHEN l.large AND l.larges > 1000 THEN '...'
            ELSE left(coalesce(CASE WHEN l.metadata = '{}' THEN ''
                                    WHEN jsonb_typeof(l.metadata) = 'string' THEN l.metadata #>> '{}'
                                    ELSE l.metadata::text END, ''), 1000) END AS metadata,
       l.state,
       -- as JSON can have it
       CASE WHEN l.acquired_at BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 00:00+00' THEN l.acquired_at END AS since,
       CASE WHEN l.expires_at BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 00:00+00' THEN l.expires_at END AS expires,
       l.acquired_at > clock_timestamp() AS suspect,
       l.n > (SELECT f.most FROM f) OR l.bytes > 33554432 AS left_out
  FROM (SELECT l.*, count(*) OVER w AS n, count(*) FILTER (WHERE l.large) OVER w AS larges, sum(l.size) OVER w AS bytes
          FROM (SELECT l.*, octet_length(l.name) + octet_length(l.holder) + least(s.stored, 1000) AS size,
                       s.stored > 2000 OR pg_column_compression(l.metadata) IS NOT NULL AS large
                  FROM (SELECT l.* FROM found l LIMIT (SELECT f.most + 1 FROM f)) l,
                       LATERAL (SELECT pg_column_size(l.metadata) AS stored) s) l
        WINDOW w AS (ROWS UNBOUNDED PRECEDING)) l
 WHERE l.bytes - l.size <= 33554432
