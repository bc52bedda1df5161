-- What the lock session is asked, many things at once: $1 says what, $2 on which
-- lock, in order. Two-int keys, the odd ones out, have 4 added to what, and their
-- first number in the upper half of the key. The answer has the backend, which a
-- pooler may have changed, and whether it has become a standby; in either case nothing
-- is done; and for each entry whether it was granted, or given back. All of it is one
-- statement, and so one backend's answer. That it was prepared in the session's own
-- backend is not enough: a pooler may prepare it anew in another one.
PREPARE "pgxlock_batch /* session */" (int[], bigint[]) AS
SELECT pg_catalog.pg_backend_pid(),
       pg_catalog.pg_is_in_recovery(),
       CASE WHEN pg_catalog.pg_backend_pid() = '/* backend */'::int AND NOT pg_catalog.pg_is_in_recovery() THEN ARRAY(
         SELECT CASE o.what
                  WHEN 0 THEN pg_catalog.pg_try_advisory_lock(o.key)
                  WHEN 1 THEN pg_catalog.pg_try_advisory_lock_shared(o.key)
                  WHEN 2 THEN pg_catalog.pg_advisory_unlock(o.key)
                  WHEN 3 THEN pg_catalog.pg_advisory_unlock_shared(o.key)
                  WHEN 4 THEN pg_catalog.pg_try_advisory_lock((o.key >> 32)::int, (o.key << 32 >> 32)::int)
                  WHEN 5 THEN pg_catalog.pg_try_advisory_lock_shared((o.key >> 32)::int, (o.key << 32 >> 32)::int)
                  WHEN 6 THEN pg_catalog.pg_advisory_unlock((o.key >> 32)::int, (o.key << 32 >> 32)::int)
                  WHEN 7 THEN pg_catalog.pg_advisory_unlock_shared((o.key >> 32)::int, (o.key << 32 >> 32)::int)
                END
           FROM (SELECT pg_catalog.unnest($1) AS what, pg_catalog.unnest($2) AS key) o) END
