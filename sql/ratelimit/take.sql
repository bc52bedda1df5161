-- Decides the requests for one limit; one row per entry, in order: whether it was
-- granted (or given back), the delay in nanoseconds, and what to give it back with. A
-- row that somebody keeps locked is waited for that long.
-- $1 nanoseconds for one event, $2 burst, $3 keys, $4 counts, $5 how long each may be
-- delayed in nanoseconds, $6 NULL, or what that entry gives back, $7 how long
SELECT d.granted, d.delay, d.tat
  FROM pg_catalog.set_config('lock_timeout', $7::text, true) AS s (was),
       LATERAL /* schema */pgxlock_limit_batch(CASE WHEN s.was IS NOT NULL THEN $1::bigint END, $2::integer, $3::text[],
                                               $4::integer[], $5::bigint[], $6::bigint[])
         WITH ORDINALITY AS d (granted, delay, tat, n)
 ORDER BY d.n
