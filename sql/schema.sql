-- Where pgxlock is installed: the schema in which an unqualified acquire_lock
-- resolves on this connection, if any, and every schema that has one.
SELECT (SELECT n.nspname::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE p.oid = to_regprocedure('acquire_lock(varchar, varchar, integer, jsonb)')),
       (SELECT coalesce(array_agg(n.nspname::text ORDER BY n.nspname), '{}') FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE p.proname = 'pgxlock_schema_version' AND p.pronargs = 0)
