-- Takes away what 000005_waiters.up.sql installed. Who waits goes on as before there
-- was a queue: it asks again, later.
DO $migration$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_change pg_catalog.record;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the lock is taken
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  PERFORM set_config('quote_all_identifiers', 'off', true);
  IF to_regclass(pg_catalog.format('%I.pgxlock_waiters', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 5', coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'undefined_table', HINT = 'Name the schema first in search_path.';
  END IF;
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  -- Below, some of the functions are called, and others are changed.
  IF EXISTS (SELECT FROM pg_catalog.unnest('{"pgxlock_check_unused()", "pgxlock_session_key(bigint)", "pgxlock_rights()", "pgxlock_hardened()", "pgxlock_objects()", "pgxlock_grants()",
                    "pgxlock_session_batch(integer[], bigint[], bigint)", "pgxlock_owner()", "pgxlock_settle(boolean)", "pgxlock_revoke(text)", "harden_locks()", "grant_locks(text, text)"}'::text[]) f (signature)
               JOIN pg_proc p ON p.oid = to_regprocedure(f.signature)::oid
              WHERE p.proowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) OR EXISTS (SELECT FROM pg_class c
              WHERE c.relnamespace = to_regnamespace(quote_ident(v_schema))::oid
                AND (c.relname::text IN ('distributed_locks', 'lock_leases') OR left(c.relname::text, 8) = 'pgxlock_')
                AND c.relowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) THEN
    RAISE EXCEPTION 'pgxlock in schema % belongs to another role', quote_ident(v_schema)
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed it, and run this again.';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 5) THEN
    RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;
  PERFORM pgxlock_check_unused();

  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '[^\n]*(waiter|ticket|publish|take_batch|withdraw|wake|tell_holders)[^\n]*\n'),
      ('harden_locks()', ', ''?pgxlock_(waiters|tickets)''?')) c (signature, added) LOOP
    EXECUTE regexp_replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.added, '', 'g');
  END LOOP;
  FOR v_change IN SELECT * FROM (VALUES
      (E'unnest(p_ops, p_ids) AS w (op, id)\n        JOIN',
       E'unnest(p_ops, p_ids, pg_catalog.array_fill(p_session, ARRAY[pg_catalog.cardinality(p_ops)])) AS w (op, id, session)\n        JOIN'),
      (E'AND s.key_id = w.id AND s.session = p_session\n', E'AND s.key_id = w.id AND s.session = w.session\n'),
      (E'SELECT s.key_space, s.key_id\n            FROM pg_catalog.unnest(v_rows)', E'SELECT s.key_space, s.key_id, s.session\n            FROM pg_catalog.unnest(v_rows)'),
      ('AND s.key_id = r.key_id AND s.session = p_session', 'AND s.key_id = r.key_id AND s.session = r.session'),
      ('AND s.key_id = o.key_id AND s.session = p_session', 'AND s.key_id = o.key_id AND s.session = o.session')) c (before, now) LOOP
    EXECUTE replace(pg_get_functiondef('pgxlock_session_batch(integer[], bigint[], bigint)'::regprocedure::oid), v_change.now, v_change.before);
  END LOOP;
  ALTER FUNCTION pgxlock_acquire_batch(text[], text[], bigint[], text[]) RESET enable_indexscan;
  ALTER FUNCTION pgxlock_acquire_batch(text[], text[], bigint[], text[]) RESET enable_bitmapscan;
  DROP FUNCTION pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint),
    pgxlock_take_batch(text[], text[], bigint[], text[], bigint[]), pgxlock_wake_batch(integer[], text[], bigint[]),
    pgxlock_withdraw_batch(integer[], text[], bigint[]), wake_lock_waiter(varchar), pgxlock_tell_holders(integer[], bigint[]),
    pgxlock_reap_waiters(integer), pgxlock_bury_waiters(integer[], text[], bigint[]), pgxlock_waiter_gone(bigint, timestamptz),
    pgxlock_waiter_passed(timestamptz), pgxlock_waiter_key(bigint);
  DROP TABLE pgxlock_waiters;
  DROP SEQUENCE pgxlock_tickets;
  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 4::bigint;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (4, false);
END $migration$;
