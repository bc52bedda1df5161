-- Who waits in the queues of this package: a process with all that wait in it for one
-- lock. kind: 0 a lease; 1, 2 an advisory key of one or two integers. A process that
-- listens lives while its session has the advisory key that client is made of.
-- After SET pgxlock.keys or pgxlock.prefix, as in leases.sql, of leases only those.
-- No caller can make this more than 200,000 rows and 32 MiB, as in leases.sql: no function publishes
-- longer texts than these, but a role that may write the table can, and dates that no caller can read.
SELECT b.kind, b.name, b.ticket, b.client, b.owner, b.waiters, b.since, b.woken, b.holds,
       b.n > 200000 OR b.upto > 33554432 AS left_out
  FROM (SELECT t.*, count(*) OVER w AS n, sum(t.size) OVER w AS upto
          FROM (SELECT m.*, octet_length(m.name) + octet_length(m.owner) + octet_length(array_to_string(m.holds, '')) AS size
                  FROM (SELECT w.kind, w.name, w.ticket, coalesce(w.client, 0) AS client, left(w.owner, 255) AS owner,
                               w.waiters, w.woken IS NOT NULL AS woken,
                               CASE WHEN w.since BETWEEN '0001-01-01 00:00+00' AND '9999-12-31 00:00+00' THEN w.since
                                    ELSE clock_timestamp() END AS since,
                               CASE WHEN w.holds = '{}' OR octet_length(array_to_string(w.holds, '')) > 65536 THEN '{}'
                                    ELSE array_remove(w.holds, NULL) END AS holds
                          FROM /* schema */pgxlock_waiters w,
                               (SELECT nullif(current_setting('pgxlock.keys', true), '')::text[] AS keys,
                                       coalesce(current_setting('pgxlock.prefix', true), '') AS prefix OFFSET 0) f
                         WHERE w.live_until > clock_timestamp() AND char_length(w.name) <= 255
                           AND (w.kind <> 0
                                OR (f.keys IS NULL OR w.name = ANY (f.keys COLLATE "C"))
                                   AND (f.prefix = '' OR starts_with(w.name, f.prefix)))
                         LIMIT 200001) m OFFSET 0) t
        WINDOW w AS (ROWS UNBOUNDED PRECEDING)) b
 WHERE b.upto - b.size <= 33554432
