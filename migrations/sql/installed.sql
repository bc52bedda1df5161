-- The version that is installed in the schema that comes first, 0 for none. It
-- is what the function there says: the version table may be marked dirty, and
-- nothing but plain SQL can call a function that may not exist.
SELECT coalesce(max(regexp_replace(pg_get_function_sqlbody(p.oid), '[^0-9]', '', 'g')::bigint), 0)
  FROM pg_proc p
 WHERE p.proname = 'pgxlock_schema_version' AND p.pronargs = 0::smallint AND p.pronamespace = to_regnamespace(quote_ident(current_schema()::text))::oid
