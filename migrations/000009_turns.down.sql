-- Takes away what 000009_turns.up.sql installed.
DO $migration$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_change pg_catalog.record;
  v_hardened boolean;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the lock is taken
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  PERFORM set_config('quote_all_identifiers', 'off', true);
  IF to_regprocedure(pg_catalog.format('%I.pgxlock_refused_batch(integer[], text[], bigint[])', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 9', coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'undefined_function', HINT = 'Name the schema first in search_path.';
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
                AND (c.relname::text IN ('distributed_locks', 'lock_leases', 'distributed_lock_shares', 'lock_shares', 'lock_holders', 'lock_waiters') OR left(c.relname::text, 8) = 'pgxlock_')
                AND c.relowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) THEN
    RAISE EXCEPTION 'pgxlock in schema % belongs to another role', quote_ident(v_schema)
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed it, and run this again.';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 9) THEN
    RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;
  PERFORM pgxlock_check_unused();

  v_hardened := pgxlock_hardened();
  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '[^\n]*(pgxlock_refused_batch|pgxlock_waited_for|pgxlock_take_in_turn|TABLE lock_(holders|waiters))[^\n]*\n'),
      ('pgxlock_objects()', '''lock_(holders|waiters)'', '),
      ('harden_locks()', '''lock_(holders|waiters)'', ')) c (signature, added) LOOP
    EXECUTE regexp_replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.added, '', 'g');
  END LOOP;
  DROP VIEW lock_waiters, lock_holders;
  EXECUTE replace(replace(pg_get_functiondef('pgxlock_take_in_turn(text[], text[], bigint[], text[], bigint[])'::regprocedure::oid),
                          '.pgxlock_take_in_turn(', '.pgxlock_take_batch('),
                  '(SELECT FROM pg_catalog.unnest(p_names) AS e (name) WHERE EXISTS (SELECT FROM pgxlock_waiters w WHERE w.kind = 0 AND w.name = e.name COLLATE "C" OFFSET 0))',
                  '(SELECT FROM pgxlock_waiters w WHERE w.kind = 0 AND w.name = ANY (p_names COLLATE "C"))');
  DROP FUNCTION pgxlock_refused_batch(integer[], text[], bigint[]), pgxlock_waited_for(integer[], text[]), pgxlock_take_in_turn(text[], text[], bigint[], text[], bigint[]);

  CREATE OR REPLACE FUNCTION pgxlock_next_token() RETURNS bigint
  LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_epoch record;
    v_timeline bigint := pgxlock_timeline();
  BEGIN
    -- By its key: where callers switch sequential scans off, one would cost so
    -- much in the planner's eyes that it compiled the query each time (4 ms).
    SELECT e.system_identifier, e.epoch_base, e.timeline INTO v_epoch FROM pgxlock_epoch e WHERE e.singleton;
    IF NOT FOUND OR v_epoch.system_identifier <> pgxlock_system_identifier() OR v_timeline < v_epoch.timeline
       OR v_epoch.epoch_base + v_timeline NOT BETWEEN 1 AND 8388607 THEN          -- 2^23 - 1: bits above the sequence
      RAISE EXCEPTION 'pgxlock: this database was moved to another cluster or restored; fencing tokens drawn now could repeat earlier ones'
        USING ERRCODE = 'LK003',
              HINT = 'Run migrations.Up, or pgxlock migrate up, or SELECT repair_lock_tokens() once, as the owner of the functions.';
    END IF;
    IF v_timeline > v_epoch.timeline THEN
      -- The first token after a failover. Remembered for the day a pg_upgrade
      -- starts again at timeline 1; whoever holds that row does it instead of us.
      PERFORM FROM pgxlock_epoch FOR UPDATE SKIP LOCKED;
      IF FOUND THEN
        UPDATE pgxlock_epoch SET timeline = v_timeline;
      END IF;
    END IF;
    RETURN ((v_epoch.epoch_base + v_timeline) << 40) + nextval('pgxlock_tokens'::regclass);
  END $$;

  CREATE OR REPLACE FUNCTION pgxlock_next_tokens(p_count bigint) RETURNS bigint[]
  LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_first bigint := pgxlock_next_token();
  BEGIN
    RETURN (SELECT pg_catalog.array_agg(CASE WHEN i = 1::bigint THEN v_first ELSE ((v_first >> 40) << 40) + nextval('pgxlock_tokens'::regclass) END)
              FROM generate_series(1::bigint, p_count) i);
  END $$;

  CREATE OR REPLACE FUNCTION pgxlock_give_back_batch(p_names text[], p_holders text[], p_tokens bigint[])
  RETURNS TABLE (outcome text, wanted boolean)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  DECLARE
    v_fresh    boolean := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
    v_outcomes text[];
    v_entries  bigint[];                    -- those whose row is there
    v_tokens   bigint[];
    v_pinned   text[] := '{}';              -- names
    v_pins     bigint[] := '{}';            -- and of which entry each is
    v_locked   text[];
    v_removed  integer[];                   -- places among the pins
    v_lives    boolean[];
    v_wanted   text[];
    i          integer;
  BEGIN
    IF (pg_catalog.cardinality(p_holders) = pg_catalog.cardinality(p_names) AND pg_catalog.cardinality(p_tokens) = pg_catalog.cardinality(p_names)) IS NOT TRUE THEN
      RAISE EXCEPTION 'every name needs a holder and a token, which may be NULL' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'cannot release a lock on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;

    v_outcomes := pg_catalog.array_fill('gone'::text, ARRAY[pg_catalog.cardinality(p_names)]);
    SELECT pg_catalog.array_agg(w.n), pg_catalog.array_agg(l.token) INTO v_entries, v_tokens
      FROM unnest(p_names, p_holders, p_tokens) WITH ORDINALITY AS w (name, holder, token, n),
           LATERAL (SELECT l.holder_id::text AS holder, l.fencing_token AS token
                      FROM distributed_locks l WHERE l.lock_name::text = w.name COLLATE "C" OFFSET 0) l
     WHERE l.holder = w.holder COLLATE "C" AND l.token = coalesce(w.token, l.token) AND left(w.holder, 1) <> '*';
    FOREACH i IN ARRAY coalesce(v_entries, '{}'::bigint[]) LOOP
      v_outcomes[i] := 'skipped';
      IF pg_try_advisory_xact_lock(pgxlock_key('pin', p_names[i])) THEN
        v_pinned := pg_catalog.array_append(v_pinned, p_names[i]);
        v_pins := pg_catalog.array_append(v_pins, i::bigint);
      END IF;
    END LOOP;
    -- Also where there is nothing to do: who may not release is told so.
    -- A token is of one grant: with that, it is the row that was looked at. In the
    -- order of the names: SKIP LOCKED waits, too, for who locks a row's new version at
    -- the wrong moment.
    v_locked := ARRAY(SELECT l.lock_name::text FROM distributed_locks l
                       WHERE l.lock_name::text = ANY (v_pinned COLLATE "C") AND l.fencing_token = ANY (v_tokens)
                       ORDER BY l.lock_name::text COLLATE "C"
                         FOR UPDATE OF l SKIP LOCKED);
    WITH removed AS (
      DELETE FROM distributed_locks l WHERE l.lock_name::text = ANY (v_locked COLLATE "C")
      RETURNING pg_catalog.array_position(v_pinned, l.lock_name::text COLLATE "C") AS place, l.expires_at > clock_timestamp() AS live
    )
    SELECT pg_catalog.array_agg(r.place), pg_catalog.array_agg(r.live) INTO v_removed, v_lives FROM removed r;
    FOR i IN 1..coalesce(pg_catalog.cardinality(v_removed), 0) LOOP
      v_outcomes[v_pins[v_removed[i]]] := CASE WHEN v_lives[i] THEN 'released' ELSE 'expired' END;
    END LOOP;

    v_wanted := ARRAY(SELECT w.name FROM pg_catalog.unnest(p_names) AS w (name)
                       WHERE EXISTS (SELECT FROM pgxlock_waiters q WHERE q.kind = 0 AND q.name = w.name COLLATE "C" OFFSET 0));
    FOR i IN 1..pg_catalog.cardinality(p_names) LOOP
      outcome := v_outcomes[i];
      wanted := NOT v_fresh OR coalesce(p_names[i] = ANY (v_wanted COLLATE "C"), false);
      RETURN NEXT;
    END LOOP;
  END $$;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 8::bigint;
  IF v_hardened THEN
    PERFORM set_config('lock_timeout', '1s', true);       -- for the tables that are in use
    PERFORM harden_locks();
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (8, false);
END $migration$;
