-- Where pgxlock is: the schema in which an unqualified acquire_lock resolves, if
-- any, and every schema that has pgxlock. A program finds its locks in the same
-- order.
SELECT (SELECT n.nspname::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE p.oid = to_regprocedure('acquire_lock(varchar, varchar, integer, jsonb)')),
       (SELECT coalesce(array_agg(n.nspname::text ORDER BY n.nspname), '{}') FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE p.proname = 'pgxlock_schema_version' AND p.pronargs = 0)
