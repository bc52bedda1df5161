-- Puts the version table right, if there is one: it records the version that is there,
-- without the dirty mark of a file that golang-migrate saw fail and that left nothing
-- behind. If all files are to run again it records none.
DO $$
DECLARE
  v_schema text   := current_setting('pgxlock.schema');
  v_table  oid    := to_regclass(format('%I.pgxlock_migrations', v_schema));
  v_there  bigint := (SELECT max(regexp_replace(pg_get_function_sqlbody(p.oid), '[^0-9]', '', 'g')::bigint)
                        FROM pg_proc p JOIN pg_roles u ON u.oid = p.proowner
                       WHERE p.proname = 'pgxlock_version' AND p.pronargs = 0 AND u.rolname = current_user
                         AND p.pronamespace = to_regnamespace(quote_ident(v_schema)));
  v_owner  text   := (SELECT quote_ident(u.rolname) FROM pg_class c JOIN pg_roles u ON u.oid = c.relowner WHERE c.oid = v_table);
  v_newer  bigint;
  v_code   text;
BEGIN
  IF v_table IS NULL THEN
    RETURN;
  END IF;
  IF v_owner <> quote_ident(current_user) THEN          -- else its triggers would run
    RAISE EXCEPTION 'the table pgxlock_migrations in schema % belongs to another role, %', quote_ident(v_schema), v_owner
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed pgxlock, and run this again.';
  END IF;
  PERFORM set_config('search_path', format('%I, pg_temp', v_schema), true);
  LOCK TABLE pgxlock_migrations IN ROW EXCLUSIVE MODE;          -- no trigger and no foreign key is made from here on
  SELECT string_agg(DISTINCT pg_describe_object(o.class, o.id, 0), ', ') INTO v_code
    FROM (SELECT g.tableoid AS class, g.oid AS id FROM pg_trigger g WHERE g.tgrelid = v_table AND NOT g.tgisinternal
          UNION ALL SELECT w.tableoid, w.oid FROM pg_rewrite w WHERE w.ev_class = v_table
          UNION ALL SELECT k.tableoid, k.oid FROM pg_constraint k WHERE k.confrelid = v_table AND k.contype = 'f') o;
  IF v_code IS NOT NULL THEN
    RAISE EXCEPTION 'in schema % this would run in the session of role %, which migrates: %',
        quote_ident(v_schema), quote_ident(current_user), v_code
      USING ERRCODE = 'invalid_object_definition',
            HINT = 'Drop it (DROP TRIGGER ... ON ...), REVOKE TRIGGER, REFERENCES on the table from other roles, and run '
                   'this again.';
  END IF;
  SELECT max(m.version) INTO v_newer
    FROM pgxlock_migrations m
   WHERE NOT m.dirty AND m.version > current_setting('pgxlock.newest')::bigint;
  IF v_newer IS NOT NULL THEN
    RAISE EXCEPTION 'the schema has version %, and this program knows up to %: use a newer one',
        v_newer, current_setting('pgxlock.newest')
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;
  IF current_setting('pgxlock.again') = 'on' THEN
    v_there := NULL;
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.dirty OR m.version IS DISTINCT FROM v_there)
     OR v_there IS NOT NULL AND NOT EXISTS (SELECT FROM pgxlock_migrations) THEN
    DELETE FROM pgxlock_migrations;
    INSERT INTO pgxlock_migrations (version, dirty) SELECT v_there, false WHERE v_there IS NOT NULL;
  END IF;
END $$
