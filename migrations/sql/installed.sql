-- The version that is installed in the schema that comes first, 0 for none, and
-- whether it belongs to this role, or to one that this role is at the mercy of
-- anyway: the schema's owner, the database's, a superuser. It is what the function there says, read and
-- not called: the version table may be marked dirty, and the function may not
-- exist, or be a stranger's.
SELECT coalesce(max(regexp_replace(pg_get_function_sqlbody(p.oid), '[^0-9]', '', 'g')::bigint), 0),
       coalesce(bool_and(p.proowner = u.oid), true),
       coalesce(bool_and(p.proowner = n.nspowner OR p.proowner = d.datdba OR o.rolsuper), true)
  FROM pg_proc p JOIN pg_roles o ON o.oid = p.proowner JOIN pg_namespace n ON n.oid = p.pronamespace, pg_roles u, pg_database d
 WHERE p.proname = 'pgxlock_schema_version' AND p.pronargs = 0::smallint AND p.pronamespace = to_regnamespace(quote_ident(current_schema()::text))::oid
   AND u.rolname = current_user AND d.datname = current_database()
