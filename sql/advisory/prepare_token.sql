-- advisory/prepare.sql for locks with fencing tokens: an answer is the token, 1 for a
-- lock that is given back, or NULL.
PREPARE "pgxlock_batch /* session */" (int[], bigint[]) AS
SELECT pg_catalog.pg_backend_pid(),
       pg_catalog.pg_is_in_recovery(),
       CASE WHEN pg_catalog.pg_backend_pid() = '/* backend */'::int AND NOT pg_catalog.pg_is_in_recovery()
            THEN /* schema */pgxlock_advisory_batch($1, $2, '/* session */'::pg_catalog.int8) END
