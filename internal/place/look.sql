-- Where pgxlock is: the schema in which an unqualified acquire_lock resolves on
-- this connection, if any, and every schema that has pgxlock. The search_path is
-- the role's, so that all is qualified.
SELECT (SELECT n.nspname::pg_catalog.text
          FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
         WHERE p.oid OPERATOR(pg_catalog.=) pg_catalog.to_regprocedure('acquire_lock(varchar, varchar, integer, jsonb)')::pg_catalog.oid),
       (SELECT coalesce(pg_catalog.array_agg(n.nspname::pg_catalog.text ORDER BY n.nspname), '{}'::pg_catalog.text[])
          FROM pg_catalog.pg_namespace n
         WHERE EXISTS (SELECT FROM pg_catalog.pg_proc p
                        WHERE p.proname OPERATOR(pg_catalog.=) 'pgxlock_version'::pg_catalog.name
                          AND p.pronamespace OPERATOR(pg_catalog.=) n.oid AND p.pronargs OPERATOR(pg_catalog.=) 0::pg_catalog.int2)
           AND EXISTS (SELECT FROM pg_catalog.pg_proc p
                        WHERE p.proname OPERATOR(pg_catalog.=) 'acquire_lock'::pg_catalog.name
                          AND p.pronamespace OPERATOR(pg_catalog.=) n.oid AND p.pronargs OPERATOR(pg_catalog.=) 4::pg_catalog.int2))
