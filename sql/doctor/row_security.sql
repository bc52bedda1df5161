-- Tables of ours with row-level security, and whether it stops the functions that
-- this role calls: they run with its rights, or hardened with their owner's.
-- $1 schema
SELECT c.relname::text,
       CASE WHEN f.prosecdef THEN c.relforcerowsecurity AND NOT o.rolsuper AND NOT o.rolbypassrls
            ELSE row_security_active(c.oid) END
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
       JOIN pg_proc f ON f.pronamespace = n.oid AND f.proname = 'acquire_lock' AND f.pronargs = 4
       JOIN pg_roles o ON o.oid = f.proowner
 WHERE n.nspname = $1::text AND c.relkind = 'r' AND c.relrowsecurity
   AND (starts_with(c.relname, 'pgxlock_') OR starts_with(c.relname, 'distributed_lock'))
 ORDER BY 1
