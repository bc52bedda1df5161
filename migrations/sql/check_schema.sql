-- Refuses unless the schema that search_path named first is the one that came
-- first, as the up files do; and if it belongs to a role that could replace there what this
-- role makes: the caller names such a schema if it trusts its owner.
DO $$
DECLARE
  v_path   text := current_setting('pgxlock.search_path');
  v_schema text := nullif(current_setting('pgxlock.schema'), '');
  v_rest   text := v_path;
  v_first  text;
  v_owner  text;
BEGIN
  LOOP
    v_first := substring(v_rest FROM '^[[:space:]]*("(?:[^"]|"")*"|[^",[:space:]]+)');
    v_rest  := substring(v_rest FROM '^[[:space:]]*(?:"(?:[^"]|"")*"|[^",[:space:]]+)[[:space:]]*,(.*)$');
    v_first := CASE WHEN v_first LIKE '"%' THEN replace(substr(v_first, 2, length(v_first) - 2), '""', '"')
                    ELSE lower(v_first) END;
    EXIT WHEN v_first IS DISTINCT FROM '$user';
    v_first := current_user;
    EXIT WHEN EXISTS (SELECT FROM pg_namespace WHERE nspname = current_user);
  END LOOP;
  IF v_schema IS NULL OR left(v_schema, 3) = 'pg_' OR v_first IS DISTINCT FROM v_schema THEN
    RAISE EXCEPTION 'cannot tell which schema is meant: search_path is %, its first usable schema is %',
        quote_literal(v_path), coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'invalid_schema_name',
            HINT = 'Set Config.Schema (--schema), or name an existing schema first in search_path. Schemas named pg_* are '
                   'refused.';
  END IF;
  SELECT r.rolname INTO v_owner
    FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner, pg_database d
   WHERE n.nspname = v_schema AND d.datname = current_database()
     AND NOT r.rolsuper AND r.rolname <> current_user AND r.oid <> d.datdba AND r.oid <> 6171;   -- pg_database_owner
  IF v_owner IS NOT NULL THEN
    RAISE EXCEPTION 'schema %, which search_path names first, belongs to role %, which is neither this role, a superuser '
                    'nor the owner of the database',
        quote_ident(v_schema), quote_ident(v_owner)
      USING ERRCODE = 'insufficient_privilege', HINT = 'Set Config.Schema (--schema) if you trust that role.';
  END IF;
END $$
