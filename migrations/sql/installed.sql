-- Returns for a schema: the installed version, 0 for none; whether it, and repair_lock_tokens, which
-- Up calls, belong to this role; whether the version belongs to one that this role must trust anyway: the schema's owner, the
-- database's, a superuser; whether this role has a table of pgxlock there; whether the schema exists; the
-- database as golang-migrate's command names it in the key of its lock, the path of a URL; whether an
-- unreleased set of files is installed, whose version had another function; and whether this role may read
-- the tables of which a row is needed, and no code but that of roles it must trust runs if it does.
-- The version is read from the text of the function and not called: the version table may be marked
-- dirty, and the function may be missing, or another role's.
-- $1 schema
SELECT coalesce(max(substring(pg_get_function_sqlbody(p.oid), '[0-9]{1,9}')::bigint) FILTER (WHERE p.version), 0),
       coalesce(bool_and(p.proowner = u.oid), true),
       coalesce(bool_and(p.proowner = n.nspowner OR p.proowner = d.datdba OR o.rolsuper) FILTER (WHERE p.version), true),
       EXISTS (SELECT FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace
                WHERE s.nspname = $1::text AND c.relname = 'pgxlock_epoch'
                 AND c.relowner = (SELECT me.oid FROM pg_roles me WHERE me.rolname = current_user)),
       EXISTS (SELECT FROM pg_namespace s WHERE s.nspname = $1::text),
       '/' || current_database(),
       EXISTS (SELECT FROM pg_proc f JOIN pg_namespace s ON s.oid = f.pronamespace
                WHERE s.nspname = $1::text AND f.proname = 'pgxlock_schema_version'),
       (SELECT count(*) = 2 FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace
          JOIN pg_roles o ON o.oid = c.relowner, pg_database b
         WHERE s.nspname = $1::text
           AND c.relname IN ('pgxlock_epoch', 'pgxlock_migrations')
           AND c.relkind = 'r'
           AND b.datname = current_database()
           AND (o.rolname = current_user OR o.oid = s.nspowner OR o.oid = b.datdba OR o.rolsuper)
           AND has_schema_privilege(s.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') AND NOT row_security_active(c.oid))
  FROM (SELECT f.oid, f.proowner, f.pronamespace, f.proname = 'pgxlock_version' AS version
          FROM pg_proc f WHERE f.pronargs = 0 AND f.proname IN ('pgxlock_version', 'repair_lock_tokens')) p
       JOIN pg_roles o ON o.oid = p.proowner JOIN pg_namespace n ON n.oid = p.pronamespace, pg_roles u, pg_database d
 WHERE n.nspname = $1::text AND u.rolname = current_user AND d.datname = current_database()
