-- Takes away what 000004_session_fences.up.sql installed. Refuses while sessions
-- hold locks with tokens, unless the session says SET pgxlock.force = on: they
-- could not fence with them any more.
DO $migration$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_change pg_catalog.record;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the lock is taken
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  PERFORM set_config('quote_all_identifiers', 'off', true);
  IF to_regclass(pg_catalog.format('%I.pgxlock_session_locks', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 4', coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'undefined_table', HINT = 'Name the schema first in search_path.';
  END IF;
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  -- Below, some of the functions are called, and others are changed.
  IF EXISTS (SELECT FROM pg_catalog.unnest('{"pgxlock_check_unused()", "pgxlock_session_key(bigint)", "pgxlock_rights()", "pgxlock_hardened()", "pgxlock_objects()", "pgxlock_grants()",
                    "pgxlock_owner()", "pgxlock_settle(boolean)", "pgxlock_revoke(text)", "harden_locks()", "grant_locks(text, text)"}'::text[]) f (signature)
               JOIN pg_proc p ON p.oid = to_regprocedure(f.signature)::oid
              WHERE p.proowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) OR EXISTS (SELECT FROM pg_class c
              WHERE c.relnamespace = to_regnamespace(quote_ident(v_schema))::oid
                AND (c.relname::text IN ('distributed_locks', 'lock_leases') OR left(c.relname::text, 8) = 'pgxlock_')
                AND c.relowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) THEN
    RAISE EXCEPTION 'pgxlock in schema % belongs to another role', quote_ident(v_schema)
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed it, and run this again.';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 4) THEN
    RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;
  LOCK TABLE pgxlock_session_locks IN ACCESS EXCLUSIVE MODE;
  PERFORM pgxlock_check_unused();

  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '[^\n]*session[^\n]*\n'),
      ('harden_locks()', ', ''?pgxlock_session_locks''?')) c (signature, added) LOOP
    EXECUTE regexp_replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.added, '', 'g');
  END LOOP;
  DROP FUNCTION pgxlock_session_batch(integer[], bigint[], bigint), assert_session_lock_held(integer, bigint, bigint, bigint), pgxlock_reap_sessions(integer, bigint),
    pgxlock_session_clear(pgxlock_session_locks[]), pgxlock_session_call(integer, bigint), pgxlock_session_key(bigint),
    pgxlock_session_pin(integer, bigint, bigint);
  DROP TABLE pgxlock_session_locks;
  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 3::bigint;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (3, false);
END $migration$;
