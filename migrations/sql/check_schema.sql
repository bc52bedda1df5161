-- Refuses unless the schema that search_path named first is the one that came
-- first, as the up files do: before golang-migrate writes into another one.
DO $$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('pgxlock.search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_rest   pg_catalog.text := v_path;
  v_first  pg_catalog.text;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
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
            HINT = 'Set Config.Schema (--schema), or name an existing schema first in search_path. Schemas named pg_* are refused.';
  END IF;
END $$
