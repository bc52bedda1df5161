-- What an operator needs to see who has a lock, and to take it away: evictions, which
-- are recorded and which the holder hears of, and the names behind advisory keys.
--
-- Needs 000007_primitives.up.sql. What is said in 000001_leases.up.sql and
-- 000004_session_fences.up.sql about how to run it, and the rules that its functions
-- keep, holds here as well.
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
                            "pgxlock_lock_shares(text, boolean)", "pgxlock_release_share(text, text, bigint, boolean)", "pgxlock_release_shares(text)", "pgxlock_share_pin(text, text)",
                            "ask_to_step_down(varchar, text)", "pgxlock_ask_to_step_down(integer, text, text, text)", "pgxlock_step_downs(integer[], text[], text[])",
                            "acquire_permit(varchar, varchar, integer, integer, jsonb)", "pgxlock_ahead(text, bigint)",
                            "pgxlock_tried(text[], bigint[], boolean[], bigint[])",
                            "pgxlock_permit_batch(text[], integer[], text[], bigint[], text[], bigint[])",
                            "pgxlock_slot(timestamptz, interval, interval, text, integer)", "pgxlock_due_runs(text, interval, interval, text, integer, boolean)",
                            "pgxlock_start_run(text, timestamptz, interval, interval, text, interval, text, text)",
                            "pgxlock_finish_run(text, timestamptz, text, text, text)", "start_run(text, interval, interval, text)",
                            "start_run_at(text, timestamptz)", "finish_run(text, timestamptz, text)", "forget_run(text, timestamptz)",
                            "allow_rate(varchar, double precision, integer, integer)", "reserve_rate(varchar, double precision, integer, integer, interval)",
                            "pgxlock_limit_batch(bigint, integer, text[], integer[], bigint[], bigint[])",
                            "pgxlock_limit_clock()",
                            "pgxlock_reap_limits(integer, integer)",
                            "evict_lock(varchar, varchar, bigint, text)", "evict_session_lock(integer, bigint, text, integer)",
                            "pgxlock_record_eviction(integer, text, text, bigint, text)", "pgxlock_evicted(integer[], text[], text[], bigint[])",
                            "pgxlock_publish_names(text[])"}'::text[]) f (signature)
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
  IF to_regclass(pg_catalog.format('%I.pgxlock_step_down', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 7', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Run the files 000001 to 000007 first.';
  END IF;
  v_hardened := pgxlock_hardened();

  v_new := to_regclass('pgxlock_evictions') IS NULL;

  ---------------------------------------------------------------- eviction --
  -- Who took which holding away, when and why: the last 1000. Its holder looks here
  -- when it finds it gone, or is told to.
  CREATE TABLE IF NOT EXISTS pgxlock_evictions (
    kind       integer NOT NULL,            -- as in pgxlock_waiters
    name       text COLLATE "C" NOT NULL,
    holder     text COLLATE "C" NOT NULL,   -- the holder id of a lease, advisory:pid:kind:key
    token      bigint NOT NULL,             -- 0 of an advisory lock
    evicted_at timestamptz NOT NULL,
    evicted_by text NOT NULL,
    reason     text NOT NULL,
    PRIMARY KEY (kind, name, holder, token)
  );

  CREATE OR REPLACE FUNCTION pgxlock_record_eviction(p_kind integer, p_name text, p_holder text, p_token bigint, p_reason text) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    IF (octet_length(p_reason) BETWEEN 1 AND 1000) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_reason must have 1 to 1000 bytes: say why, the holder and those who look later want to know' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO pgxlock_evictions AS e (kind, name, holder, token, evicted_at, evicted_by, reason)
    VALUES (p_kind, p_name, p_holder, p_token, clock_timestamp(),
            session_user::text || coalesce(' (' || nullif(current_setting('application_name'), '') || ')', ''), p_reason)
    ON CONFLICT ON CONSTRAINT pgxlock_evictions_pkey
    DO UPDATE SET evicted_at = excluded.evicted_at, evicted_by = excluded.evicted_by, reason = excluded.reason;
    IF pg_try_advisory_xact_lock(pgxlock_key('evictions', '')) THEN          -- one is enough
      WITH old AS MATERIALIZED (
        SELECT e.kind, e.name, e.holder, e.token FROM pgxlock_evictions e
         WHERE e.evicted_at < (SELECT n.evicted_at FROM pgxlock_evictions n ORDER BY n.evicted_at DESC OFFSET 999 LIMIT 1)
           FOR UPDATE OF e SKIP LOCKED
      )
      DELETE FROM pgxlock_evictions e USING old o WHERE e.kind = o.kind AND e.name = o.name AND e.holder = o.holder AND e.token = o.token;
    END IF;
  END $$;

  -- Ends one holding of a lease, a permit or a share, as if it had run out, and leaves
  -- it to nobody who can come back: the holder of the row, or the token of the share, is
  -- what no caller can have. So a renewal finds it gone and a fence fails. Not deleted:
  -- for that no transaction may be open that has asserted the lease, and who asserts it
  -- all the time could not be evicted. Such a transaction goes on, and until it has
  -- ended its pin keeps everybody out.
  CREATE OR REPLACE FUNCTION evict_lock(p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint, p_reason text) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off SET lock_timeout = '2s' AS $$
  DECLARE
    v_name   text := p_lock_name;
    v_holder text := p_holder_id;
    v_shared boolean;
    v_now    timestamptz;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', v_name);
    PERFORM pgxlock_check('p_holder_id', v_holder);
    IF p_fencing_token IS NULL THEN
      RAISE EXCEPTION 'p_fencing_token must not be NULL: it says which acquisition is meant' USING ERRCODE = 'invalid_parameter_value',
        HINT = 'The views lock_leases and lock_shares show it.';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'cannot evict on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'leases are evicted in READ COMMITTED: an older snapshot does not show who holds them' USING ERRCODE = 'active_sql_transaction';
    END IF;
    PERFORM pgxlock_durable();
    BEGIN
      SELECT l.holder_id::text = '*shared' COLLATE "C" INTO v_shared FROM distributed_locks l
       WHERE l.lock_name::text = v_name COLLATE "C" AND l.fencing_token = p_fencing_token FOR NO KEY UPDATE;
      v_now := clock_timestamp();
      IF v_shared THEN
        UPDATE distributed_lock_shares s SET fencing_token = 0::bigint, expires_at = least(s.expires_at, v_now)
         WHERE s.lock_name::text = v_name COLLATE "C" AND s.holder_id::text = v_holder COLLATE "C" AND s.fencing_token = p_fencing_token;
      ELSE
        UPDATE distributed_locks l SET holder_id = '*evicted', expires_at = least(l.expires_at, v_now)
         WHERE l.lock_name::text = v_name COLLATE "C" AND l.holder_id::text = v_holder COLLATE "C" AND l.fencing_token = p_fencing_token;
      END IF;
      IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      IF v_shared THEN                      -- it lasts as long as those who stay
        UPDATE distributed_locks l
           SET expires_at = coalesce((SELECT max(s.expires_at) FROM distributed_lock_shares s
                                       WHERE s.lock_name::text = v_name COLLATE "C" AND s.fencing_token = p_fencing_token AND s.expires_at > v_now),
                                     least(l.expires_at, v_now))
         WHERE l.lock_name::text = v_name COLLATE "C";
      END IF;
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      RETURN false;
    END;
    PERFORM pgxlock_record_eviction(0, v_name, v_holder, p_fencing_token, p_reason);
    -- Who waits, for this or for any permit of its semaphore. In this transaction: it is
    -- seldom, and whose ticket is not there yet asks again by itself.
    PERFORM FROM pgxlock_wake_batch('{0,0}'::integer[], ARRAY[v_name, regexp_replace(v_name, '#[0-9]+$'::text, '#'::text)], '{NULL,NULL}'::bigint[]);
    RETURN true;
  END $$;

  -- Only its session can give back an advisory lock: its Locker is told to.
  CREATE OR REPLACE FUNCTION evict_session_lock(p_pid integer, p_key bigint, p_reason text, p_key_space integer DEFAULT 1) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET lock_timeout = '2s' AS $$
  BEGIN
    IF p_pid IS NULL OR p_key IS NULL OR (p_key_space BETWEEN 1 AND 2) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_pid and p_key must not be NULL, and p_key_space must be 1, or 2 for a key of two integers' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'cannot evict on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    PERFORM FROM pg_locks l
      WHERE l.locktype = 'advisory' AND l.granted AND l.pid = p_pid
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.objsubid::integer = p_key_space AND l.classid::bigint << 32 | l.objid::bigint = p_key;
    IF NOT FOUND THEN
      RETURN false;
    END IF;
    PERFORM pgxlock_record_eviction(p_key_space, p_key::text, 'advisory:' || p_pid::text || ':' || p_key_space::text || ':' || p_key::text, 0::bigint, p_reason);
    PERFORM pg_notify('pgxlock_holder_' || p_pid::text, 'evict'::text);
    RETURN true;
  END $$;

  -- Which of these holdings were evicted, by whom, why, and how many milliseconds ago.
  CREATE OR REPLACE FUNCTION pgxlock_evicted(p_kinds integer[], p_names text[], p_holders text[], p_tokens bigint[])
  RETURNS TABLE (n bigint, evicted_by text, reason text, ms bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    IF (pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_names) AND pg_catalog.cardinality(p_holders) = pg_catalog.cardinality(p_names)
        AND pg_catalog.cardinality(p_tokens) = pg_catalog.cardinality(p_names)) IS NOT TRUE THEN
      RAISE EXCEPTION 'every lock needs a kind, a name, a holder and a token' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN QUERY
    SELECT w.n, e.evicted_by, e.reason, (date_part('epoch'::text, clock_timestamp() - e.evicted_at) * 1000::float8)::bigint
      FROM unnest(p_kinds, p_names, p_holders, p_tokens) WITH ORDINALITY AS w (kind, name, holder, token, n)
      JOIN pgxlock_evictions e ON e.kind = w.kind AND e.name = w.name COLLATE "C" AND e.holder = w.holder COLLATE "C" AND e.token = w.token;
  END $$;

  ------------------------------------------------------------------- names --
  -- What advisory keys are made of: the server knows only the number. That somebody
  -- held the key not long ago is all that a row says; pg_locks says who does.
  -- Unlogged: it is published again.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_names (
    key_id  bigint PRIMARY KEY,
    name    text COLLATE "C" NOT NULL,
    held_at timestamptz NOT NULL
  );
  CREATE INDEX IF NOT EXISTS pgxlock_names_held_at ON pgxlock_names (held_at);

  -- Names that nobody has published for an hour go, so that the table has what is
  -- held for long, and no more.
  CREATE OR REPLACE FUNCTION pgxlock_publish_names(p_names text[]) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET lock_timeout = '100ms' AS $$
  BEGIN
    IF (pg_catalog.cardinality(p_names) <= 1000) IS NOT TRUE
       OR EXISTS (SELECT FROM pg_catalog.unnest(p_names) w (name) WHERE (char_length(w.name) BETWEEN 1 AND 255) IS NOT TRUE) THEN
      RAISE EXCEPTION 'p_names must have up to 1000 names of 1 to 255 characters' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'nothing is published on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    INSERT INTO pgxlock_names AS k (key_id, name, held_at)
    SELECT DISTINCT ON (w.id) w.id, w.name, clock_timestamp()
      FROM (SELECT advisory_lock_key(u.name) AS id, u.name FROM pg_catalog.unnest(p_names) u (name)) w ORDER BY w.id
    ON CONFLICT ON CONSTRAINT pgxlock_names_pkey DO UPDATE SET name = excluded.name, held_at = excluded.held_at;
    IF pg_try_advisory_xact_lock(pgxlock_key('names', '')) THEN              -- one is enough
      WITH old AS MATERIALIZED (
        SELECT k.key_id FROM pgxlock_names k
         WHERE k.key_id = ANY (ARRAY(SELECT o.key_id FROM pgxlock_names o WHERE o.held_at < clock_timestamp() - interval '1 hour' ORDER BY o.held_at LIMIT 2000))
           AND k.held_at < clock_timestamp() - interval '1 hour'
         ORDER BY k.key_id
           FOR UPDATE OF k SKIP LOCKED
      )
      DELETE FROM pgxlock_names k USING old o WHERE k.key_id = o.key_id;
    END IF;
  END $$;

  ----------------------------------------------------------------- waiters --
  -- Locks in the order of the keys, as where tickets are refreshed: SKIP LOCKED can wait
  -- all the same, when whoever changed a row commits between the look at it and the try
  -- for its lock, and another one has locked the new version by then.
  CREATE OR REPLACE FUNCTION pgxlock_bury_waiters(p_kinds integer[], p_names text[], p_before bigint[]) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  BEGIN
    WITH dead AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket
        FROM unnest(p_kinds, p_names, p_before) AS b (kind, name, before)
        JOIN pgxlock_waiters w ON w.kind = b.kind AND w.name = b.name COLLATE "C" AND w.ticket < b.before
       WHERE pgxlock_waiter_gone(w.client, w.live_until)
       ORDER BY w.kind, w.name, w.ticket
         FOR UPDATE OF w SKIP LOCKED
    )
    DELETE FROM pgxlock_waiters w USING dead d WHERE w.kind = d.kind AND w.name = d.name AND w.ticket = d.ticket;
  END $$;

  ------------------------------------------------------------------ rights --
  -- Into the functions that know all of ours goes what is new here.
  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '           (NULL, ''SELECT'', ''TABLE lock_leases''',
$rights$           (true, 'EXECUTE', 'FUNCTION evict_lock(varchar, varchar, bigint, text)', '{administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION evict_session_lock(integer, bigint, text, integer)', '{administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_record_eviction(integer, text, text, bigint, text)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_evicted(integer[], text[], text[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_publish_names(text[])', '{application}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_evictions', '{monitoring,administration}'::text[]),
           (false, 'SELECT', 'TABLE pgxlock_evictions', '{application}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_evictions', '{administration}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_names', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_names', '{application}'::text[]),
$rights$),
      ('harden_locks()', ' IN SHARE UPDATE EXCLUSIVE', ', pgxlock_evictions, pgxlock_names'),
      ('harden_locks()', ', ''pgxlock_tokens''', ', ''pgxlock_evictions'', ''pgxlock_names''')) c (signature, before, added) LOOP
    IF position(v_change.added IN pg_get_functiondef(v_change.signature::regprocedure::oid)) = 0 THEN         -- else this runs again
      EXECUTE replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.before, v_change.added || v_change.before);
    END IF;
  END LOOP;

  -- Who may write the leases by a right on the table hears why one was taken away, and
  -- tells the names of its keys. It may not evict.
  IF v_new AND NOT v_hardened THEN
    FOR v_change IN SELECT DISTINCT CASE WHEN x.grantee = 0::oid THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)::text) END AS grantee
                      FROM pg_class c, aclexplode(c.relacl) x
                     WHERE c.oid = 'distributed_locks'::regclass::oid AND x.grantee <> c.relowner AND x.privilege_type = 'INSERT' LOOP
      EXECUTE 'GRANT SELECT ON pgxlock_evictions TO ' || v_change.grantee;
      EXECUTE 'GRANT SELECT, INSERT, UPDATE, DELETE ON pgxlock_names TO ' || v_change.grantee;
    END LOOP;
  END IF;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 8::bigint;

  ---------------------------------------------------------------- comments --
  COMMENT ON TABLE pgxlock_evictions IS 'pgxlock: who took which holding away, when and why; the last 1000. Write it only through the functions.';
  COMMENT ON COLUMN pgxlock_evictions.kind IS 'As in pgxlock_waiters.';
  COMMENT ON COLUMN pgxlock_evictions.name IS 'As in pgxlock_waiters.';
  COMMENT ON COLUMN pgxlock_evictions.holder IS 'The holder id of a lease; advisory:pid:kind:key, of which the session was asked to give it back.';
  COMMENT ON COLUMN pgxlock_evictions.token IS 'Of the acquisition; 0 of an advisory lock.';
  COMMENT ON COLUMN pgxlock_evictions.evicted_at IS 'When; of an advisory lock, when it was asked for last.';
  COMMENT ON COLUMN pgxlock_evictions.evicted_by IS 'Who: the role that logged in, and its application_name.';
  COMMENT ON COLUMN pgxlock_evictions.reason IS 'Why.';
  COMMENT ON TABLE pgxlock_names IS 'pgxlock: names behind advisory keys that were held for some seconds within the last hour. Write it only through the function.';
  COMMENT ON COLUMN pgxlock_names.key_id IS 'advisory_lock_key(name).';
  COMMENT ON COLUMN pgxlock_names.held_at IS 'When a holder published it last.';
  COMMENT ON FUNCTION evict_lock(varchar, varchar, bigint, text) IS
    'Takes a lease, a permit or a share away from a holder, for which p_reason is recorded in pgxlock_evictions. True if it was the holder''s, with that token; else nothing happens. Others may have it at once: the holder finds out at its next renewal, and only what it writes under assert_lock_held(), or a resource that looks at tokens, is safe until then. A transaction that has asserted the lock goes on, and keeps others out until it ends. READ COMMITTED only.';
  COMMENT ON FUNCTION evict_session_lock(integer, bigint, text, integer) IS
    'Asks the session p_pid to give back an advisory lock, for which p_reason is recorded in pgxlock_evictions; true if it has the lock now. A Locker that listens does so at once, and its caller''s lock is lost; any other session does not. p_key_space: 2 for a key of two integers, with the first in the high half of p_key. In a transaction of its own: it notifies.';
  COMMENT ON FUNCTION pgxlock_record_eviction(integer, text, text, bigint, text) IS 'pgxlock, internal: records an eviction.';
  COMMENT ON FUNCTION pgxlock_evicted(integer[], text[], text[], bigint[]) IS 'pgxlock, internal: which of these holdings were evicted, by whom, why and how many milliseconds ago.';
  COMMENT ON FUNCTION pgxlock_publish_names(text[]) IS 'pgxlock, internal: tells the names of advisory keys that are held.';
  COMMENT ON FUNCTION pgxlock_bury_waiters(integer[], text[], bigint[]) IS 'pgxlock, internal: removes the dead that stand before a number in each queue.';
  COMMENT ON FUNCTION pgxlock_schema_version() IS 'pgxlock: version of this schema.';

  -------------------------------------------------------------------- rows --
  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN             -- made in the middle of this
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 8) THEN
    RAISE EXCEPTION 'pgxlock: schema % already has a later version (%)', quote_ident(v_schema),
        (SELECT max(m.version) FROM pgxlock_migrations m)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Nothing is to be done; to go back run the down files in reverse order.';
  END IF;
  IF v_hardened THEN
    PERFORM set_config('lock_timeout', '1s', true);       -- for the tables that are in use
    PERFORM harden_locks();
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (8, false);
END $migration$;
