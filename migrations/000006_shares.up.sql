-- Shared leases: many may hold a name together, and nobody exclusively meanwhile. And
-- releases that say whether anybody waits, so that who gives back what nobody waits for
-- does not ask.
--
-- Those who share a name are ONE row of distributed_locks, with the reserved holder
-- *shared and a token of its own, that lasts as long as the longest of them: the
-- group. So acquire_lock(), and all that was there before, excludes it and is
-- excluded by it without knowing of it. Each of them is a row, a share, with the
-- token of its group; it counts for nothing without a group that has that token.
--
-- Who writes the shares of a name has its row locked or, where it has none, its
-- guard. Who changes which of them count writes the row as well, so that no older
-- snapshot can decide about the group by shares that have changed since (40001).
--
-- Needs 000005_waiters.up.sql. What is said in 000001_leases.up.sql and 000004_session_fences.up.sql
-- about how to run it, and the rules that its functions keep, holds here as well.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_rest   pg_catalog.text := v_path;
  v_first  pg_catalog.text;
  v_foreign pg_catalog.text;
  v_hardened boolean;
  v_change   pg_catalog.record;
  v_new      boolean;

  -- Asked before anything is made, and again when all is made and nothing was
  -- read or written but definitions.
  v_check  pg_catalog.text := $check$
    SELECT string_agg(o.name || ' (owned by ' || quote_ident(pg_get_userbyid(o.owner)::text) || ')', ', ')
      FROM (SELECT c.relname::text AS name, c.relowner AS owner FROM pg_class c
             WHERE c.relnamespace = to_regnamespace(quote_ident($1))::oid
               AND (c.relname::text IN ('distributed_locks', 'lock_leases', 'distributed_lock_shares', 'lock_shares') OR left(c.relname::text, 8) = 'pgxlock_')
            UNION ALL
            SELECT p.oid::regprocedure::text, p.proowner
              FROM pg_catalog.unnest('{"acquire_lock(varchar, varchar, integer, jsonb)", "try_acquire_lock(varchar, varchar, interval, jsonb)",
                            "renew_lock(varchar, varchar, bigint, interval)", "extend_lock(varchar, varchar, integer)",
                            "release_lock(varchar, varchar)", "release_lock_fenced(varchar, varchar, bigint)", "release_all_locks(varchar)",
                            "assert_lock_held(varchar, varchar, bigint, boolean)", "advisory_lock_key(text)",
                            "reap_expired_locks(interval, integer)", "repair_lock_tokens()", "pgxlock_schema_version()",
                            "pgxlock_key(text, text)", "pgxlock_next_token()", "pgxlock_renew(text, text, bigint, interval)",
                            "pgxlock_release(text, text, bigint)", "lock_tx(text, interval, boolean, boolean)",
                            "claim_once(text, interval, interval)", "purge_claims(interval, integer)",
                            "pgxlock_renew_batch(text[], text[], bigint[], bigint[])", "pgxlock_release_batch(text[], text[], bigint[])",
                            "pgxlock_holders(text)", "pgxlock_rights()", "pgxlock_hardened()", "pgxlock_objects()", "pgxlock_grants()", "pgxlock_owner()",
                            "pgxlock_settle(boolean)", "pgxlock_revoke(text)", "harden_locks()", "soften_locks()", "grant_locks(text, text)",
                            "revoke_locks(text)", "pgxlock_session_batch(integer[], bigint[], bigint)", "assert_session_lock_held(integer, bigint, bigint, bigint)",
                            "pgxlock_reap_sessions(integer, bigint)", "pgxlock_session_key(bigint)", "pgxlock_session_pin(integer, bigint, bigint)",
                            "pgxlock_session_call(integer, bigint)", "pgxlock_next_tokens(bigint)",
                            "pgxlock_acquire_batch(text[], text[], bigint[], text[])",
                            "pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint)",
                            "pgxlock_take_batch(text[], text[], bigint[], text[], bigint[])", "pgxlock_wake_batch(integer[], text[], bigint[])",
                            "pgxlock_withdraw_batch(integer[], text[], bigint[])", "wake_lock_waiter(varchar)", "pgxlock_tell_holders(integer[], bigint[])",
                            "pgxlock_reap_waiters(integer)", "pgxlock_bury_waiters(integer[], text[], bigint[])", "pgxlock_waiter_key(bigint)",
                            "pgxlock_waiter_gone(bigint, timestamptz)", "pgxlock_waiter_passed(timestamptz)",
                            "pgxlock_system_identifier()", "pgxlock_give_back_batch(text[], text[], bigint[])", "pgxlock_in_change(xid)",
                            "try_acquire_shared_lock(varchar, varchar, interval, jsonb)", "acquire_shared_lock(varchar, varchar, integer, jsonb)",
                            "extend_shared_lock(varchar, varchar, integer)", "release_shared_lock(varchar, varchar)",
                            "assert_shared_lock_held(varchar, varchar, bigint, boolean)", "pgxlock_share_each(text[], text[], bigint[], text[])",
                            "pgxlock_share_batch(text[], text[], bigint[], text[], bigint[])", "pgxlock_renew_shares_batch(text[], text[], bigint[], bigint[])",
                            "pgxlock_release_shares_batch(text[], text[], bigint[])", "pgxlock_share_holders(text)", "pgxlock_reap_shares(interval, integer)",
                            "pgxlock_lock_shares(text, boolean)", "pgxlock_release_share(text, text, bigint, boolean)", "pgxlock_release_shares(text)", "pgxlock_share_pin(text, text)"}'::text[]) f (signature)
              JOIN pg_proc p ON p.oid = to_regprocedure(pg_catalog.format('%I.', $1) || f.signature)::oid) o
     WHERE o.owner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user) $check$;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the schema is known
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  PERFORM set_config('quote_all_identifiers', 'off', true);

  -- The schema that was named must be the one that gets the objects.
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
    RAISE EXCEPTION 'pgxlock: cannot tell which schema to install into: search_path is %, its first usable schema is %',
        quote_literal(v_path), coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'invalid_schema_name',
            HINT = 'Name an existing schema first, for example: SET search_path = public. Schemas named pg_* are refused.';
  END IF;

  -- Two migrators wait for each other here whatever tool they came with.
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign
      USING ERRCODE = 'insufficient_privilege',
            HINT = 'If that role is the one that owns pgxlock, SET ROLE to it and run this again; else drop them.';
  END IF;
  IF to_regclass(pg_catalog.format('%I.pgxlock_waiters', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 5', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Run the files 000001 to 000005 first.';
  END IF;
  v_hardened := pgxlock_hardened();

  v_new := to_regclass('distributed_lock_shares') IS NULL;

  ------------------------------------------------------------------ tokens --
  -- A server is of one cluster for as long as it runs, so that a session reads the
  -- file which says so once, when it plans a call, and not for each token.
  ALTER FUNCTION pgxlock_system_identifier() IMMUTABLE;

  --------------------------------------------------------------- give back --
  -- What a Locker gives back at once: for each entry, in order, what became of it
  -- (as pgxlock_release_batch() says, which is for older programs, whose roles may not
  -- be able to read the queue), and whether anybody waits for the lease.
  --
  -- The look comes in a statement after the rows were deleted, and sees the tickets
  -- that were committed until then. Whose ticket comes later asks later, and finds
  -- the lease free, or its row just being deleted by this transaction: see
  -- pgxlock_take_batch(). Above READ COMMITTED it could see too little: then it says
  -- that somebody may wait.
  --
  -- The names are looked for one by one or as an array, never by a join, whose plan
  -- could read all of the table.
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

  -------------------------------------------------------------------- take --
  -- Whether the transaction that deleted, changed or locked a row goes on in the
  -- snapshot that shows it; p_xmax is the row's xmax. STABLE, or it would look with
  -- a snapshot of its own.
  CREATE OR REPLACE FUNCTION pgxlock_in_change(p_xmax xid) RETURNS boolean
  LANGUAGE sql STABLE
  RETURN p_xmax <> '0'::xid AND NOT pg_visible_in_snapshot(
    greatest(0::bigint, pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 2147483648::bigint
             + (p_xmax::text::bigint - pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 2147483648::bigint & 4294967295::bigint))::text::xid8, pg_current_snapshot());

  -- Who was refused with a ticket, though nobody stands before it, sleeps until it is
  -- woken. That is not sure while the row which refused it is just being deleted, by
  -- who may have looked for tickets before this one was there; nor if the row has
  -- gone meanwhile. Then it is told to ask again soon: in half of the time that its
  -- ticket has been there. So it asks a few times while a release takes long.
  --
  -- No lock tells that without being in the way of the release.
  FOR v_change IN SELECT * FROM (VALUES
      (E'coalesce(g.held_by, l.holder), coalesce(g.ms, l.ms), v_firsts[w.n] IS NOT NULL\n', E'coalesce(g.held_by, l.holder), least(s.ms, coalesce(CASE WHEN s.ms IS NULL OR g.ms > 0::bigint THEN g.ms END, l.ms)), v_firsts[w.n] IS NOT NULL\n'),
      (E'AND l.expires_at > v_now OFFSET 0) l ON true\n     ORDER BY w.n;\n', $now$AND l.expires_at > v_now OFFSET 0) l ON true
      LEFT JOIN LATERAL (
        SELECT greatest(2::bigint, (date_part('epoch'::text, v_now - q.since) * 500::float8)::bigint) AS ms
          FROM pgxlock_waiters q
         WHERE NOT g.acquired AND q.kind = 0 AND q.name = w.name COLLATE "C" AND q.ticket = p_tickets[w.n]
           AND NOT EXISTS (SELECT FROM distributed_locks l
                            WHERE l.lock_name::text = w.name COLLATE "C" AND l.expires_at > v_now AND NOT pgxlock_in_change(l.xmax) OFFSET 0) OFFSET 0) s ON true
     ORDER BY w.n;
$now$)) c (before, now) LOOP
    EXECUTE replace(pg_get_functiondef('pgxlock_take_batch(text[], text[], bigint[], text[], bigint[])'::regprocedure::oid), v_change.before, v_change.now);
  END LOOP;

  ------------------------------------------------------------------- table --
  CREATE TABLE IF NOT EXISTS distributed_lock_shares (
    lock_name     varchar(255) COLLATE "C",
    holder_id     varchar(255) COLLATE "C",
    fencing_token bigint      NOT NULL,     -- of the group
    acquired_at   timestamptz NOT NULL,
    expires_at    timestamptz NOT NULL,     -- not later than that of the group
    metadata      jsonb       NOT NULL,
    PRIMARY KEY (lock_name, holder_id)
  );
  ALTER TABLE distributed_lock_shares SET (fillfactor = 45, vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
  IF v_new THEN
    -- Groups that a forced down file left run out by themselves. Who joined one would
    -- be taken for all of it, as it is not known any more who else is in it.
    UPDATE distributed_locks l SET holder_id = '*shared before' WHERE l.holder_id::text = '*shared' COLLATE "C";
  END IF;

  -- The pin of one share; its length tells where the name ends.
  CREATE OR REPLACE FUNCTION pgxlock_share_pin(p_name text, p_holder text) RETURNS bigint
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN pgxlock_key('share', char_length(p_name)::text || ':' || p_name || p_holder);
  END $$;

  -- Locks the row of the group, which may have run out. NULL: there is none, or,
  -- without waiting, somebody has it locked. To be called in a subtransaction that
  -- is rolled back if it turns out that nothing is to be done.
  CREATE OR REPLACE FUNCTION pgxlock_lock_shares(p_name text, p_wait boolean, OUT token bigint, OUT expires timestamptz)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    IF p_wait THEN
      SELECT l.fencing_token, l.expires_at INTO token, expires FROM distributed_locks l
       WHERE l.lock_name::text = p_name COLLATE "C" AND l.holder_id::text = '*shared' COLLATE "C" FOR NO KEY UPDATE;
    ELSE
      SELECT l.fencing_token, l.expires_at INTO token, expires FROM distributed_locks l
       WHERE l.lock_name::text = p_name COLLATE "C" AND l.holder_id::text = '*shared' COLLATE "C" FOR NO KEY UPDATE SKIP LOCKED;
    END IF;
  END $$;

  ----------------------------------------------------------------- acquire --
  CREATE OR REPLACE FUNCTION try_acquire_shared_lock(
    p_lock_name varchar, p_holder_id varchar, p_ttl interval DEFAULT '30 seconds', p_metadata jsonb DEFAULT '{}',
    OUT acquired boolean, OUT fencing_token bigint, OUT expires_at timestamptz, OUT remaining interval, OUT held_by varchar)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_name     text  := p_lock_name;
    v_me       text  := p_holder_id;
    v_metadata jsonb := coalesce(p_metadata, jsonb '{}');
    v_ttl      interval;
    v_now      timestamptz;
    v_live     boolean;
    v_token    bigint;
    v_until    timestamptz;
    r          record;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', v_name);
    PERFORM pgxlock_check('p_holder_id', v_me);
    v_ttl := pgxlock_ttl(p_ttl);
    IF octet_length(v_metadata::text) > 65536 THEN
      RAISE EXCEPTION 'p_metadata must not exceed 65536 bytes, it has %', octet_length(v_metadata::text)
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'cannot acquire a lock on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;

    acquired := false;
    FOR i IN 1..3 LOOP
      SELECT l.holder_id::text AS holder, l.expires_at AS expires INTO r
        FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
      v_live := FOUND;
      v_now := clock_timestamp();
      v_live := v_live AND r.expires > v_now;
      held_by := r.holder; expires_at := r.expires; remaining := CASE WHEN isfinite(r.expires) THEN r.expires - v_now END;
      IF v_live AND r.holder IS DISTINCT FROM '*shared' COLLATE "C" THEN
        RETURN;
      END IF;

      v_token := NULL;
      IF v_live THEN                        -- join it; judged again once it is locked
        PERFORM pgxlock_durable();
        BEGIN
          SELECT g.token, g.expires INTO v_token, v_until FROM pgxlock_lock_shares(v_name, false) g;
          IF v_token IS NULL OR v_until <= clock_timestamp() THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
        EXCEPTION WHEN SQLSTATE 'LK900' THEN
          v_token := NULL;
        END;
      ELSE
        -- Taken as anybody takes it, by who can be nobody else, and made a group
        -- before it is committed.
        SELECT t.fencing_token INTO v_token
          FROM try_acquire_lock(v_name::varchar, ('shared ' || gen_random_uuid()::text)::varchar, v_ttl, jsonb '{}') t;
        IF v_token IS NOT NULL THEN         -- what earlier groups have left
          DELETE FROM distributed_lock_shares s WHERE s.lock_name::text = v_name COLLATE "C";
        END IF;
      END IF;

      IF v_token IS NOT NULL THEN
        v_now := clock_timestamp();
        v_until := v_now + v_ttl;
        -- As for an exclusive one: the same holder while live renews, and the
        -- default metadata is no wish to erase what an earlier call stored.
        INSERT INTO distributed_lock_shares AS s (lock_name, holder_id, fencing_token, acquired_at, expires_at, metadata)
        VALUES (v_name, v_me, v_token, v_now, v_until, v_metadata)
        ON CONFLICT ON CONSTRAINT distributed_lock_shares_pkey DO UPDATE
          SET fencing_token = excluded.fencing_token, expires_at = excluded.expires_at,
              acquired_at = CASE WHEN s.expires_at > v_now THEN s.acquired_at ELSE v_now END,
              metadata = CASE WHEN s.expires_at > v_now AND v_metadata = jsonb '{}' THEN s.metadata ELSE v_metadata END;
        -- Who lasts less long than before may have been the longest.
        UPDATE distributed_locks l SET holder_id = '*shared', expires_at = CASE WHEN v_until >= l.expires_at THEN v_until ELSE (
                 SELECT max(s.expires_at) FROM distributed_lock_shares s WHERE s.lock_name::text = v_name COLLATE "C" AND s.fencing_token = v_token) END
         WHERE l.lock_name::text = v_name COLLATE "C";
        acquired := true; fencing_token := v_token; expires_at := v_until; remaining := v_ttl; held_by := v_me;
        RETURN;
      END IF;
    END LOOP;
  END $$;

  CREATE OR REPLACE FUNCTION acquire_shared_lock(
    p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer DEFAULT 30, p_metadata jsonb DEFAULT '{}')
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN (SELECT CASE WHEN t.acquired THEN true WHEN t.held_by::text <> '*shared' COLLATE "C" THEN false END
              FROM try_acquire_shared_lock(p_lock_name, p_holder_id, pg_catalog.make_interval(secs => p_ttl_seconds), p_metadata) t);
  END $$;

  ----------------------------------------------------------- renew, release --
  CREATE OR REPLACE FUNCTION extend_shared_lock(p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer DEFAULT 30)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_name  text := p_lock_name;
    v_me    text := p_holder_id;
    v_ttl   interval;
    v_until timestamptz;
    r       record;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', v_name);
    PERFORM pgxlock_check('p_holder_id', v_me);
    v_ttl := pgxlock_ttl(pg_catalog.make_interval(secs => p_ttl_seconds));
    PERFORM FROM distributed_lock_shares s, distributed_locks l
      WHERE s.lock_name::text = v_name COLLATE "C" AND s.holder_id::text = v_me COLLATE "C" AND l.lock_name::text = v_name COLLATE "C"
        AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token AND s.expires_at > clock_timestamp();
    IF NOT FOUND THEN
      RETURN false;
    END IF;
    PERFORM pgxlock_durable();
    BEGIN
      SELECT g.token, g.expires INTO r FROM pgxlock_lock_shares(v_name, true) g;
      UPDATE distributed_lock_shares s SET expires_at = clock_timestamp() + v_ttl
       WHERE s.lock_name::text = v_name COLLATE "C" AND s.holder_id::text = v_me COLLATE "C" AND s.fencing_token = r.token
         AND s.expires_at > clock_timestamp() AND r.expires > clock_timestamp()
      RETURNING s.expires_at INTO v_until;
      IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      UPDATE distributed_locks l SET expires_at = CASE WHEN v_until >= l.expires_at THEN v_until ELSE (
               SELECT max(s.expires_at) FROM distributed_lock_shares s WHERE s.lock_name::text = v_name COLLATE "C" AND s.fencing_token = r.token) END
       WHERE l.lock_name::text = v_name COLLATE "C";
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      RETURN false;
    END;
    RETURN true;
  END $$;

  -- p_token NULL: whatever token the holder's share has.
  --   released  it was live, and the last one: the name is free
  --   left      it was live, and so are others
  --   expired   it was there, but it had run out: it goes if that needs no wait
  --   gone      it was released before, or the group is over
  --   skipped   without waiting: a transaction that asserted it is open, or somebody
  --             is just changing the group; ask again
  CREATE OR REPLACE FUNCTION pgxlock_release_share(p_lock_name text, p_holder_id text, p_token bigint, p_wait boolean) RETURNS text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_outcome text := 'gone';
    v_wait    boolean;                      -- for who is just changing the group
    v_now     timestamptz;
    v_live    boolean;
    v_until   timestamptz;
    r         record;
  BEGIN
    SELECT s.expires_at > clock_timestamp() INTO v_live FROM distributed_lock_shares s, distributed_locks l
     WHERE s.lock_name::text = p_lock_name COLLATE "C" AND s.holder_id::text = p_holder_id COLLATE "C" AND l.lock_name::text = p_lock_name COLLATE "C"
       AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token AND (p_token IS NULL OR s.fencing_token = p_token);
    IF NOT FOUND THEN
      RETURN v_outcome;
    END IF;
    PERFORM pgxlock_durable();
    v_wait := p_wait AND v_live;
    BEGIN
      SELECT g.token INTO r FROM pgxlock_lock_shares(p_lock_name, v_wait) g;
      IF NOT v_wait THEN
        v_outcome := CASE WHEN v_live THEN 'skipped' ELSE 'expired' END;
      END IF;
      IF r.token IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      IF NOT pg_try_advisory_xact_lock(pgxlock_share_pin(p_lock_name, p_holder_id)) THEN
        v_outcome := (SELECT CASE WHEN s.expires_at > clock_timestamp() THEN 'skipped' ELSE 'expired' END FROM distributed_lock_shares s
                       WHERE s.lock_name::text = p_lock_name COLLATE "C" AND s.holder_id::text = p_holder_id COLLATE "C" AND s.fencing_token = r.token);
        v_outcome := coalesce(v_outcome, 'gone');
        IF p_wait AND v_outcome = 'skipped' THEN
          RAISE EXCEPTION 'the share of lock "%" cannot be released now: a transaction that asserted it is still open', p_lock_name
            USING ERRCODE = 'lock_not_available', HINT = 'Release after that transaction has ended, or inside it, or leave the share to its expiry.';
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      v_now := clock_timestamp();
      DELETE FROM distributed_lock_shares s
       WHERE s.lock_name::text = p_lock_name COLLATE "C" AND s.holder_id::text = p_holder_id COLLATE "C"
         AND s.fencing_token = r.token AND (p_token IS NULL OR r.token = p_token)
      RETURNING s.expires_at > v_now INTO v_live;
      IF NOT FOUND THEN
        v_outcome := 'gone';
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      -- Whoever stays, and does not renew any more, keeps others out no longer than
      -- until its own share has run out.
      v_until := (SELECT max(s.expires_at) FROM distributed_lock_shares s
                   WHERE s.lock_name::text = p_lock_name COLLATE "C" AND s.fencing_token = r.token AND s.expires_at > v_now);
      IF v_until IS NULL AND pg_try_advisory_xact_lock(pgxlock_key('pin', p_lock_name)) THEN
        DELETE FROM distributed_lock_shares s WHERE s.lock_name::text = p_lock_name COLLATE "C";
        DELETE FROM distributed_locks l WHERE l.lock_name::text = p_lock_name COLLATE "C";
      ELSE
        -- Pinned: who expired and asserted its share writes under it. The next one
        -- takes what has run out, as always, when that transaction has ended.
        UPDATE distributed_locks l SET expires_at = coalesce(v_until, least(l.expires_at, v_now)) WHERE l.lock_name::text = p_lock_name COLLATE "C";
      END IF;
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      RETURN v_outcome;
    END;
    RETURN CASE WHEN NOT v_live THEN 'expired' WHEN v_until IS NULL THEN 'released' ELSE 'left' END;
  END $$;

  CREATE OR REPLACE FUNCTION release_shared_lock(p_lock_name varchar, p_holder_id varchar)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    PERFORM pgxlock_check('p_lock_name', p_lock_name::text);
    PERFORM pgxlock_check('p_holder_id', p_holder_id::text);
    RETURN pgxlock_release_share(p_lock_name::text, p_holder_id::text, NULL::bigint, true) IN ('released', 'left');
  END $$;

  -- For release_all_locks(). Who may not read shares has none.
  CREATE OR REPLACE FUNCTION pgxlock_release_shares(p_holder_id text) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_name  text;
    v_count bigint := 0;
  BEGIN
    IF NOT has_table_privilege('distributed_lock_shares'::regclass::oid, 'SELECT'::text) THEN
      RETURN v_count;
    END IF;
    FOR v_name IN SELECT s.lock_name::text FROM distributed_lock_shares s WHERE s.holder_id::text = p_holder_id COLLATE "C" ORDER BY s.lock_name::text COLLATE "C" LOOP
      IF pgxlock_release_share(v_name, p_holder_id, NULL::bigint, true) IN ('released', 'left') THEN
        v_count := v_count + 1::bigint;
      END IF;
    END LOOP;
    RETURN v_count;
  END $$;

  ----------------------------------------------------------------- batches --
  CREATE OR REPLACE FUNCTION pgxlock_share_each(p_names text[], p_holders text[], p_ttls bigint[], p_metadata text[])
  RETURNS TABLE (acquired boolean, fencing_token bigint, held_by text, remaining_ms bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    r record;
  BEGIN
    FOR r IN SELECT w.name, w.holder, w.ttl, w.metadata
               FROM unnest(p_names, p_holders, p_ttls, p_metadata) WITH ORDINALITY AS w (name, holder, ttl, metadata, n) ORDER BY w.n LOOP
      SELECT t.acquired, t.fencing_token, t.held_by::text, (date_part('epoch'::text, t.remaining) * 1000::float8)::bigint
        INTO acquired, fencing_token, held_by, remaining_ms
        FROM try_acquire_shared_lock(r.name::varchar, r.holder::varchar, r.ttl::float8 * interval '1 millisecond', r.metadata::jsonb) t;
      RETURN NEXT;
    END LOOP;
  END $$;

  -- In turn they are taken as exclusive ones are, but for the taking itself.
  EXECUTE replace(replace(pg_get_functiondef('pgxlock_take_batch(text[], text[], bigint[], text[], bigint[])'::regprocedure::oid),
                          'pgxlock_take_batch', 'pgxlock_share_batch'), 'pgxlock_acquire_batch', 'pgxlock_share_each');

  -- The groups are locked first, in one order and without waiting, and each is written
  -- once, however many of its shares are renewed.
  --   renewed
  --   gone     expired, released or taken over
  --   skipped  somebody is just changing the group: to be tried again
  CREATE OR REPLACE FUNCTION pgxlock_renew_shares_batch(p_names text[], p_holders text[], p_tokens bigint[], p_ttls bigint[]) RETURNS SETOF text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
  DECLARE
    v_names   text[];
    v_tokens  bigint[];
    v_renewed bigint[];
  BEGIN
    PERFORM pgxlock_durable();
    WITH want AS MATERIALIZED (
      SELECT DISTINCT w.name COLLATE "C" AS name FROM pg_catalog.unnest(p_names) AS w (name)
    ), locked AS MATERIALIZED (
      SELECT w.name, l.fencing_token AS token
        FROM want w JOIN distributed_locks l ON l.lock_name::text = w.name
       WHERE l.holder_id::text = '*shared' COLLATE "C" AND l.expires_at > clock_timestamp()
       ORDER BY l.lock_name::text COLLATE "C"
         FOR NO KEY UPDATE OF l SKIP LOCKED
    )
    SELECT pg_catalog.array_agg(k.name), pg_catalog.array_agg(k.token) INTO v_names, v_tokens FROM locked k;

    -- In a later statement: as they are now.
    WITH due AS MATERIALIZED (
      SELECT w.n, w.name, w.holder, w.ttl::float8 * interval '1 millisecond' AS ttl
        FROM unnest(p_names, p_holders, p_tokens, p_ttls) WITH ORDINALITY AS w (name, holder, token, ttl, n)
        JOIN unnest(v_names, v_tokens) AS g (name, token) ON g.name = w.name COLLATE "C"
        JOIN distributed_lock_shares s ON s.lock_name::text = w.name COLLATE "C" AND s.holder_id::text = w.holder COLLATE "C"
       WHERE s.fencing_token = g.token AND g.token = coalesce(w.token, g.token) AND s.expires_at > clock_timestamp()
         AND w.ttl BETWEEN 1::bigint AND 3110400000000::bigint
    ), renewed AS (
      UPDATE distributed_lock_shares s SET expires_at = clock_timestamp() + d.ttl
        FROM due d WHERE s.lock_name::text = d.name COLLATE "C" AND s.holder_id::text = d.holder COLLATE "C"
      RETURNING d.name, s.expires_at
    ), latest AS MATERIALIZED (
      SELECT r.name COLLATE "C" AS name, max(r.expires_at) AS until FROM renewed r GROUP BY r.name COLLATE "C"
    ), raised AS (
      UPDATE distributed_locks l SET expires_at = greatest(l.expires_at, t.until) FROM latest t WHERE l.lock_name::text = t.name
    )
    SELECT pg_catalog.array_agg(d.n) INTO v_renewed FROM due d;

    RETURN QUERY
    SELECT CASE WHEN w.n = ANY (v_renewed) THEN 'renewed'
                WHEN EXISTS (SELECT FROM distributed_lock_shares s, distributed_locks l
                              WHERE s.lock_name::text = w.name COLLATE "C" AND s.holder_id::text = w.holder COLLATE "C" AND l.lock_name::text = w.name COLLATE "C"
                                AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token
                                AND s.fencing_token = coalesce(w.token, s.fencing_token) AND s.expires_at > clock_timestamp() OFFSET 0) THEN 'skipped'
                ELSE 'gone' END
      FROM unnest(p_names, p_holders, p_tokens) WITH ORDINALITY AS w (name, holder, token, n)
     ORDER BY w.n;
  END $$;

  CREATE OR REPLACE FUNCTION pgxlock_release_shares_batch(p_names text[], p_holders text[], p_tokens bigint[]) RETURNS SETOF text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    RETURN QUERY
    SELECT pgxlock_release_share(w.name, w.holder, w.token, false)
      FROM unnest(p_names, p_holders, p_tokens) WITH ORDINALITY AS w (name, holder, token, n)
     ORDER BY w.n;
  END $$;

  ------------------------------------------------------------------- fence --
  -- The pins first, the rows in a LATER statement, as in assert_lock_held(). The
  -- pin of the name keeps everybody out who would end the group; that of the share
  -- keeps it from being given back.
  CREATE OR REPLACE FUNCTION assert_shared_lock_held(
    p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint DEFAULT NULL, p_allow_expired boolean DEFAULT false)
  RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_name text := p_lock_name;
    v_me   text := p_holder_id;
    v_read_committed boolean := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
    v_found boolean;
    v_live  boolean;
    v_timeout text;
    r      record;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', v_name);
    PERFORM pgxlock_check('p_holder_id', v_me);
    IF current_setting('transaction_read_only') = 'on' THEN
      RAISE EXCEPTION 'assert_shared_lock_held() protects writes, and this transaction is read-only' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Begin a READ WRITE transaction on the primary; or leave the call out, because nothing can be written here.';
    END IF;
    IF NOT pg_try_advisory_xact_lock_shared(pgxlock_key('pin', v_name)) OR NOT pg_try_advisory_xact_lock_shared(pgxlock_share_pin(v_name, v_me)) THEN
      RAISE EXCEPTION 'lock "%" is not shared by "%" for this transaction: it is just being taken over or released', v_name, v_me USING ERRCODE = 'LK001';
    END IF;
    IF v_read_committed THEN
      SELECT s.fencing_token AS token, s.expires_at AS expires INTO r
        FROM distributed_lock_shares s, distributed_locks l
       WHERE s.lock_name::text = v_name COLLATE "C" AND s.holder_id::text = v_me COLLATE "C" AND l.lock_name::text = v_name COLLATE "C"
         AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token;
      v_found := FOUND;
    ELSE
      -- A snapshot shows the past: the row locks make PostgreSQL compare it with
      -- the present (40001 if the group is over, or the share was given back, since).
      -- Who joins, renews or leaves passes them.
      v_timeout := current_setting('lock_timeout');
      PERFORM set_config('lock_timeout', '10ms', true);
      SELECT s.fencing_token AS token, s.expires_at AS expires INTO r
        FROM distributed_lock_shares s, distributed_locks l
       WHERE s.lock_name::text = v_name COLLATE "C" AND s.holder_id::text = v_me COLLATE "C" AND l.lock_name::text = v_name COLLATE "C"
         AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token FOR KEY SHARE SKIP LOCKED;
      v_found := FOUND;
      PERFORM set_config('lock_timeout', v_timeout, true);
      IF NOT v_found THEN
        PERFORM FROM distributed_lock_shares s, distributed_locks l
          WHERE s.lock_name::text = v_name COLLATE "C" AND s.holder_id::text = v_me COLLATE "C" AND l.lock_name::text = v_name COLLATE "C";
        IF NOT FOUND THEN
          RAISE EXCEPTION 'the share of lock "%" is not visible to this transaction''s snapshot', v_name USING ERRCODE = 'LK002',
            DETAIL = 'The snapshot is older than the acquisition, or the lock was released before it.',
            HINT = 'Acquire first, then begin the transaction, and assert in its first statement.';
        END IF;
      END IF;
    END IF;
    v_found := v_found AND (p_fencing_token IS NULL OR r.token = p_fencing_token);
    v_live := v_found AND r.expires > clock_timestamp();
    IF v_live OR v_found AND p_allow_expired THEN
      RETURN r.token;
    END IF;
    IF v_found AND NOT v_read_committed THEN
      RAISE EXCEPTION 'the share of lock "%" had expired at %, as far as this transaction''s snapshot shows', v_name, r.expires USING ERRCODE = 'LK002',
        HINT = 'Later renewals are not visible to it. With p_allow_expired => true an expired share of a lock that nobody took will do.';
    END IF;
    RAISE EXCEPTION 'lock "%" is not shared by "%"', v_name, v_me USING ERRCODE = 'LK001',
      DETAIL = CASE WHEN v_found THEN 'It expired at ' || r.expires::text || '.'
                    WHEN v_read_committed THEN 'It was released, or never acquired, or that has not committed; or somebody has taken the lock since.'
                    ELSE 'Its token is another one, or somebody has a row of it locked.' END;
  END $$;

  ----------------------------------------------------------------- holders --
  -- Who holds a lease now, each of those who share it.
  CREATE OR REPLACE FUNCTION pgxlock_share_holders(p_name text)
  RETURNS TABLE (holder text, metadata text, fencing_token bigint, acquired_at timestamptz, expires_at timestamptz, shared boolean)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    r record;
  BEGIN
    FOR r IN SELECT h.holder, h.metadata, h.fencing_token, h.acquired_at, h.expires_at FROM pgxlock_holders(p_name) h LOOP
      IF r.holder <> '*shared' COLLATE "C" THEN         -- for which no right on shares is needed
        RETURN QUERY SELECT r.holder, r.metadata, r.fencing_token, r.acquired_at, r.expires_at, false;
      ELSE
        RETURN QUERY
        SELECT s.holder_id::text, coalesce(CASE WHEN jsonb_typeof(s.metadata) = 'string' THEN s.metadata #>> '{}'::text[]
                                                WHEN s.metadata <> jsonb '{}' THEN s.metadata::text END, ''),
               s.fencing_token, s.acquired_at, s.expires_at, true
          FROM distributed_lock_shares s
         WHERE s.lock_name::text = p_name COLLATE "C" AND s.fencing_token = r.fencing_token AND s.expires_at > clock_timestamp();
      END IF;
    END LOOP;
  END $$;

  CREATE OR REPLACE VIEW lock_shares AS
    SELECT s.lock_name,
           CASE WHEN s.expires_at > c.clock AND l.fencing_token IS NOT NULL THEN 'live'
                WHEN s.expires_at > c.clock - interval '1 hour' THEN 'expired'
                ELSE 'abandoned' END AS state,
           s.holder_id,
           s.fencing_token,
           CASE WHEN isfinite(s.acquired_at) THEN c.clock - s.acquired_at END AS held_for,
           CASE WHEN isfinite(s.expires_at) THEN s.expires_at - c.clock END AS remaining,
           s.acquired_at,
           s.expires_at,
           s.metadata
      FROM distributed_lock_shares s
      LEFT JOIN distributed_locks l ON l.lock_name::text = s.lock_name::text COLLATE "C" AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token,
           LATERAL (SELECT clock_timestamp() AS clock) c;

  ------------------------------------------------------------ housekeeping --
  CREATE OR REPLACE FUNCTION pgxlock_reap_shares(p_grace interval DEFAULT '1 hour', p_limit integer DEFAULT 1000) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_count bigint := 0;
    r       record;
  BEGIN
    IF p_grace IS NULL OR p_grace < interval '0' THEN
      RAISE EXCEPTION 'p_grace must be 0 or more' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 THEN
      RAISE EXCEPTION 'p_limit must be between 1 and 10000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'shares are removed in READ COMMITTED: an older snapshot does not show which groups there are' USING ERRCODE = 'active_sql_transaction';
    END IF;
    FOR r IN SELECT s.lock_name::text AS name, s.holder_id::text AS holder FROM distributed_lock_shares s WHERE s.expires_at <= clock_timestamp() - p_grace LIMIT p_limit LOOP
      BEGIN
        -- Of a lease that somebody holds alone, what is left goes another time.
        PERFORM FROM distributed_locks l
          WHERE l.lock_name::text = r.name COLLATE "C" AND (l.holder_id::text = '*shared' COLLATE "C" OR l.expires_at <= clock_timestamp())
            FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
          IF NOT pg_try_advisory_xact_lock(pgxlock_key('guard', r.name)) THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
          PERFORM FROM distributed_locks l WHERE l.lock_name::text = r.name COLLATE "C";
          IF FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
        END IF;
        IF NOT pg_try_advisory_xact_lock(pgxlock_share_pin(r.name, r.holder)) THEN
          RAISE EXCEPTION USING ERRCODE = 'LK900';
        END IF;
        PERFORM FROM distributed_lock_shares s
          WHERE s.lock_name::text = r.name COLLATE "C" AND s.holder_id::text = r.holder COLLATE "C" AND s.expires_at <= clock_timestamp() - p_grace
            FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
          RAISE EXCEPTION USING ERRCODE = 'LK900';
        END IF;
        DELETE FROM distributed_lock_shares s WHERE s.lock_name::text = r.name COLLATE "C" AND s.holder_id::text = r.holder COLLATE "C";
        v_count := v_count + 1::bigint;
      EXCEPTION WHEN SQLSTATE 'LK900' THEN
        NULL;                               -- in use, or not what it was
      END;
    END LOOP;
    RETURN v_count;
  END $$;

  ------------------------------------------------------- what was there before --
  -- release_all_locks() gives back shares, too; and a wait for a group is one for
  -- each who shares it, where circles of waits are looked for.
  FOR v_change IN SELECT * FROM (VALUES
      ('release_all_locks(varchar)', 'RETURN v_count;', 'RETURN v_count + pgxlock_release_shares(v_me);'),
      ('pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint)',
       E'        UNION ALL\n        SELECT w.id, ''advisory:''',
       E'        UNION ALL\n        SELECT w.id, s.holder FROM waiting w, LATERAL pgxlock_share_holders(w.name) s WHERE w.kind = 0 AND s.shared\n        UNION ALL\n        SELECT w.id, ''advisory:''')) c (signature, before, now) LOOP
    IF position(v_change.now IN pg_get_functiondef(v_change.signature::regprocedure::oid)) = 0 THEN          -- else this runs again
      EXECUTE replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.before, v_change.now);
    END IF;
  END LOOP;

  ------------------------------------------------------------------ rights --
  -- Into the functions that know all of ours goes what is new here.
  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '           (NULL, ''SELECT'', ''TABLE lock_leases''',
$rights$           (true, 'EXECUTE', 'FUNCTION pgxlock_give_back_batch(text[], text[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_in_change(xid)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION try_acquire_shared_lock(varchar, varchar, interval, jsonb)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION acquire_shared_lock(varchar, varchar, integer, jsonb)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION extend_shared_lock(varchar, varchar, integer)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION release_shared_lock(varchar, varchar)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION assert_shared_lock_held(varchar, varchar, bigint, boolean)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_share_batch(text[], text[], bigint[], text[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_renew_shares_batch(text[], text[], bigint[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_release_shares_batch(text[], text[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_share_holders(text)', '{application,monitoring,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_reap_shares(interval, integer)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_share_each(text[], text[], bigint[], text[])', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_lock_shares(text, boolean)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_release_share(text, text, bigint, boolean)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_release_shares(text)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_share_pin(text, text)', '{}'::text[]),
           (NULL, 'SELECT', 'TABLE lock_shares', '{monitoring,administration}'::text[]),
           (false, 'SELECT', 'TABLE distributed_lock_shares', '{monitoring}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE distributed_lock_shares', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE distributed_lock_shares', '{administration}'::text[]),
$rights$),
      ('pgxlock_objects()', '''lock_leases''', '''lock_shares'', ''distributed_lock_shares'', '),
      ('harden_locks()', '''lock_leases''', '''lock_shares'', ''distributed_lock_shares'', '),
      ('harden_locks()', ' IN SHARE UPDATE EXCLUSIVE', ', distributed_lock_shares')) c (signature, before, added) LOOP
    IF position(v_change.added IN pg_get_functiondef(v_change.signature::regprocedure::oid)) = 0 THEN         -- else this runs again
      EXECUTE replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.before, v_change.added || v_change.before);
    END IF;
  END LOOP;

  -- What a role may do with the leases by a right on their table, or their view, it
  -- may do with shares.
  IF v_new AND NOT v_hardened THEN
    FOR v_change IN SELECT x.privilege_type AS privilege, CASE WHEN x.grantee = 0::oid THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)::text) END AS grantee,
                           CASE c.relkind WHEN 'v'::"char" THEN 'lock_shares' ELSE 'distributed_lock_shares' END AS shares
                      FROM pg_class c, aclexplode(c.relacl) x
                     WHERE (c.oid = 'distributed_locks'::regclass::oid OR c.oid = 'lock_leases'::regclass::oid AND x.privilege_type = 'SELECT')
                       AND x.grantee <> c.relowner AND x.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE') LOOP
      EXECUTE 'GRANT ' || v_change.privilege || ' ON ' || v_change.shares || ' TO ' || v_change.grantee;
    END LOOP;
  END IF;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 6::bigint;

  ---------------------------------------------------------------- comments --
  COMMENT ON FUNCTION pgxlock_give_back_batch(text[], text[], bigint[]) IS
    'pgxlock, internal: pgxlock_release_batch(), and whether anybody waits for each lease; who does is woken by pgxlock_wake_batch(), after this has committed. Each call in a transaction of its own.';
  COMMENT ON FUNCTION pgxlock_in_change(xid) IS 'pgxlock, internal: whether the transaction that has this xmax of a row goes on in the snapshot that shows the row.';
  COMMENT ON TABLE distributed_lock_shares IS 'pgxlock: who shares a lease. A share counts while it has not expired and distributed_locks has a row of its name with holder *shared and the same token. Write it only through the functions.';
  COMMENT ON COLUMN distributed_lock_shares.fencing_token IS 'Of the group: all who hold the lock together have the same.';
  COMMENT ON COLUMN distributed_lock_shares.expires_at IS 'Not later than that of the group.';
  COMMENT ON VIEW lock_shares IS 'pgxlock: who shares leases, as an operator reads it. live; expired: holds nobody up; abandoned: expired for more than an hour. The group itself is in lock_leases, with holder *shared.';
  COMMENT ON FUNCTION acquire_shared_lock(varchar, varchar, integer, jsonb) IS
    'Shares the lease p_lock_name for p_ttl_seconds if nobody holds it exclusively; true if p_holder_id has a share now, false if somebody holds it exclusively, NULL if somebody is just joining, renewing, leaving or taking it: ask again. Never waits. The same holder while live renews. Takes effect with the commit of the calling transaction. Above READ COMMITTED it may raise 40001: call it in a transaction of its own.';
  COMMENT ON FUNCTION try_acquire_shared_lock(varchar, varchar, interval, jsonb) IS
    'Like acquire_shared_lock, with the fencing token, which is that of the group: greater than that of whoever held the lease exclusively before. Not acquired: held_by, expires_at and remaining tell of the exclusive holder; where they tell of *shared, or nothing, ask again.';
  COMMENT ON FUNCTION extend_shared_lock(varchar, varchar, integer) IS
    'Sets the expiry of a share to now + p_ttl_seconds; false if the holder has lost it. Waits for another one that is just joining, renewing or leaving: renew several in one order, by name.';
  COMMENT ON FUNCTION release_shared_lock(varchar, varchar) IS
    'Gives a share back. True if it was still live; false if it had expired or is not the holder''s. Raises 55P03 for a live share while a transaction that called assert_shared_lock_held is open.';
  COMMENT ON FUNCTION release_all_locks(varchar) IS
    'Gives back every lease of the holder, and every share, or none (55P03) while a live one is asserted by an open transaction. Returns how many were still live.';
  COMMENT ON FUNCTION assert_shared_lock_held(varchar, varchar, bigint, boolean) IS
    'assert_lock_held() for a share: raises LK001 if the holder no longer has it, and until this transaction ends nobody can take the lease exclusively. Never waits; others may join, renew and leave. Above READ COMMITTED LK002: the snapshot is older than the acquisition. A savepoint that is rolled back takes the protection with it.';
  COMMENT ON FUNCTION pgxlock_share_batch(text[], text[], bigint[], text[], bigint[]) IS
    'pgxlock, internal: pgxlock_take_batch() for shares. Refused, nobody ahead, and held by *shared or nobody: somebody is just changing the group; ask again.';
  COMMENT ON FUNCTION pgxlock_share_each(text[], text[], bigint[], text[]) IS 'pgxlock, internal: try_acquire_shared_lock() for each.';
  COMMENT ON FUNCTION pgxlock_renew_shares_batch(text[], text[], bigint[], bigint[]) IS 'pgxlock, internal: what a Locker renews at once of shares.';
  COMMENT ON FUNCTION pgxlock_release_shares_batch(text[], text[], bigint[]) IS 'pgxlock, internal: what a Locker gives back at once of shares.';
  COMMENT ON FUNCTION pgxlock_share_holders(text) IS 'pgxlock, internal: who holds a lease now, exclusively or together.';
  COMMENT ON FUNCTION pgxlock_reap_shares(interval, integer) IS
    'Housekeeping only: removes up to p_limit shares that expired more than p_grace ago, and returns how many. Acquiring never needs it. In a transaction of its own: nobody renews a share of the same lease meanwhile.';
  COMMENT ON FUNCTION pgxlock_lock_shares(text, boolean) IS 'pgxlock, internal: locks the row of a group.';
  COMMENT ON FUNCTION pgxlock_release_share(text, text, bigint, boolean) IS 'pgxlock, internal: gives a share back.';
  COMMENT ON FUNCTION pgxlock_release_shares(text) IS 'pgxlock, internal: gives all shares of a holder back.';
  COMMENT ON FUNCTION pgxlock_share_pin(text, text) IS 'pgxlock, internal: the advisory key that fences of a share lock shared, beside that of its name.';
  COMMENT ON FUNCTION pgxlock_schema_version() IS 'pgxlock: version of this schema.';

  -------------------------------------------------------------------- rows --
  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN             -- made in the middle of this
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 6) THEN
    RAISE EXCEPTION 'pgxlock: schema % already has a later version (%)', quote_ident(v_schema),
        (SELECT max(m.version) FROM pgxlock_migrations m)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Nothing is to be done; to go back run the down files in reverse order.';
  END IF;
  IF v_hardened THEN
    PERFORM set_config('lock_timeout', '1s', true);       -- for the tables that are in use
    PERFORM harden_locks();
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (6, false);
END $migration$;
