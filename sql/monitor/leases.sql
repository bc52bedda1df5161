-- The leases and permits, of those that are shared each of who share them. All of them,
-- or, after SET pgxlock.key = 'order:42', those of one name; after SET pgxlock.prefix =
-- 'order:', those whose name begins so; after SET pgxlock.states = 'live', or
-- 'expired,abandoned', those in these states.
-- suspect: it began later than now, so that the server's clock was set back, and the
-- lease lasts longer than it should.
-- No caller can make this more than 200,000 rows and about 32 MiB: left_out, in one row more than
-- that, says that there are others. Of metadata the first 1,000 characters; to read what is compressed
-- or longer than 2,000 bytes takes long, so only of the first 1,000 of those, and ... of others.
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
       l.n > 200000 OR l.bytes > 33554432 AS left_out
  FROM (SELECT l.*, count(*) OVER w AS n, count(*) FILTER (WHERE l.large) OVER w AS larges, sum(l.size) OVER w AS bytes
          FROM (SELECT l.*, octet_length(l.name) + octet_length(l.holder) + least(s.stored, 1000) AS size,
                       s.stored > 2000 OR pg_column_compression(l.metadata) IS NOT NULL AS large
                  FROM (SELECT a.lock_name::text AS name, false AS shared, a.holder_id::text AS holder,
                               a.fencing_token AS token, a.metadata, a.state, a.acquired_at, a.expires_at
                          FROM /* schema */lock_leases a WHERE a.holder_id::text <> '*shared' COLLATE "C"
                        UNION ALL
                        SELECT s.lock_name::text, true, s.holder_id::text, s.fencing_token, s.metadata, s.state,
                               s.acquired_at, s.expires_at
                          FROM /* schema */lock_shares s) l,
                       (SELECT coalesce(current_setting('pgxlock.key', true), '') AS key,
                               coalesce(current_setting('pgxlock.prefix', true), '') AS prefix,
                               string_to_array(nullif(current_setting('pgxlock.states', true), ''), ',') AS states OFFSET 0) f,
                       LATERAL (SELECT pg_column_size(l.metadata) AS stored) s
                 WHERE (f.key = '' OR l.name = f.key COLLATE "C")
                   AND (f.prefix = '' OR starts_with(l.name, f.prefix))
                   AND (f.states IS NULL OR l.state = ANY (f.states))
                 LIMIT 200001) l
        WINDOW w AS (ROWS UNBOUNDED PRECEDING)) l
 WHERE l.bytes - l.size <= 33554432
