-- Fencing tokens and fences for session locks, that is for advisory locks which a
-- session holds until it unlocks them or ends: a table of who may fence with
-- what, one call that takes and gives back many locks, and the fence.
--
-- Only sessions that lock through pgxlock_session_batch() are fenced against each
-- other. Who calls pg_advisory_lock() itself shares the locks with them, but
-- does not wait for fenced transactions; against it a fence only tells whether the
-- session that locked is still there.
--
-- Needs 000003_hardening.up.sql. What is said in 000001_leases.up.sql and there
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

  -- Asked before anything is made, and again when all is made and nothing was
  -- read or written but definitions.
  v_check  pg_catalog.text := $check$
    SELECT string_agg(o.name || ' (owned by ' || quote_ident(pg_get_userbyid(o.owner)::text) || ')', ', ')
      FROM (SELECT c.relname::text AS name, c.relowner AS owner FROM pg_class c
             WHERE c.relnamespace = to_regnamespace(quote_ident($1))::oid
               AND (c.relname::text IN ('distributed_locks', 'lock_leases') OR left(c.relname::text, 8) = 'pgxlock_')
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
                            "pgxlock_acquire_batch(text[], text[], bigint[], text[])"}'::text[]) f (signature)
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
  IF to_regprocedure(pg_catalog.format('%I.harden_locks()', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 3', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Run the files 000001 to 000003 first.';
  END IF;
  v_hardened := pgxlock_hardened();

  ------------------------------------------------------------------- table --
  -- A row exists from the grant to the unlock, and is committed before anybody is
  -- told of the grant. What is left when a session dies or a fenced transaction
  -- outlasts the unlock goes when the next one takes the lock, or when reaped.
  --
  -- Rows come only from who holds the lock, and go only under the pin of the row,
  -- taken exclusively. So where there is no row there is no fence to wait for, and
  -- where a row cannot be removed the lock is busy.
  --
  -- Unlogged, because a crash ends every session, too.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_session_locks (
    key_space integer NOT NULL,             -- as objsubid in pg_locks: 1 for one bigint, 2 for two integers
    key_id    bigint  NOT NULL,             -- of two integers, the first one in the high half
    session   bigint  NOT NULL,             -- what pgxlock_session_key() makes the key of
    shared    boolean NOT NULL,
    token     bigint,                       -- NULL: given back under an open fence
    PRIMARY KEY (key_space, key_id, session)
  );
  ALTER TABLE pgxlock_session_locks SET (vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

  -------------------------------------------------------------------- keys --
  -- Without the table, unlike those of leases: all installations in a database
  -- share the advisory locks.
  --
  -- The liveness key: its session has it locked exclusively for as long as it lives.
  CREATE OR REPLACE FUNCTION pgxlock_session_key(p_session bigint) RETURNS bigint
  LANGUAGE sql STABLE PARALLEL SAFE
  RETURN ('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('session', 'UTF8'::name) || decode('00', 'hex')
      || int8send(p_session)), 1, 8), 'hex'))::bit(64)::bigint;

  -- The pin of a row: fences share it.
  CREATE OR REPLACE FUNCTION pgxlock_session_pin(p_space integer, p_id bigint, p_session bigint) RETURNS bigint
  LANGUAGE sql STABLE PARALLEL SAFE
  RETURN ('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('session pin', 'UTF8'::name) || decode('00', 'hex')
      || int4send(p_space) || int8send(p_id) || int8send(p_session)), 1, 8), 'hex'))::bit(64)::bigint;

  ------------------------------------------------------------- lock, unlock --
  -- Operations: 0 tries to lock, 1 to lock shared, 2 unlocks, 3 unlocks shared; and
  -- 4 more for a key of two integers.
  CREATE OR REPLACE FUNCTION pgxlock_session_call(p_op integer, p_id bigint) RETURNS boolean
  LANGUAGE sql VOLATILE
  RETURN CASE p_op
    WHEN 0 THEN pg_try_advisory_lock(p_id)
    WHEN 1 THEN pg_try_advisory_lock_shared(p_id)
    WHEN 2 THEN pg_advisory_unlock(p_id)
    WHEN 3 THEN pg_advisory_unlock_shared(p_id)
    WHEN 4 THEN pg_try_advisory_lock((p_id >> 32)::integer, (p_id << 32 >> 32)::integer)
    WHEN 5 THEN pg_try_advisory_lock_shared((p_id >> 32)::integer, (p_id << 32 >> 32)::integer)
    WHEN 6 THEN pg_advisory_unlock((p_id >> 32)::integer, (p_id << 32 >> 32)::integer)
    WHEN 7 THEN pg_advisory_unlock_shared((p_id >> 32)::integer, (p_id << 32 >> 32)::integer) END;

  -- Removes those of the rows which no fence pins and nobody has locked, if they
  -- are still as they were seen; returns how many.
  CREATE OR REPLACE FUNCTION pgxlock_session_clear(p_rows pgxlock_session_locks[]) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
  DECLARE
    v_count bigint;
  BEGIN
    WITH pinned AS MATERIALIZED (
      SELECT r.key_space, r.key_id, r.session, r.token FROM pg_catalog.unnest(p_rows) r
       WHERE pg_try_advisory_xact_lock(pgxlock_session_pin(r.key_space, r.key_id, r.session))
    ), locked AS MATERIALIZED (
      SELECT s.key_space, s.key_id, s.session
        FROM pinned p
        JOIN pgxlock_session_locks s ON s.key_space = p.key_space AND s.key_id = p.key_id AND s.session = p.session
       WHERE coalesce(s.token = p.token, s.token IS NULL AND p.token IS NULL)
         FOR UPDATE OF s SKIP LOCKED
    )
    DELETE FROM pgxlock_session_locks s USING locked k
     WHERE s.key_space = k.key_space AND s.key_id = k.key_id AND s.session = k.session;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
  END $$;

  -- Answers in order: NULL if refused, else the token of a lock, or 1 for an unlock.
  -- Nothing in here waits for a lock, a row or another transaction.
  CREATE OR REPLACE FUNCTION pgxlock_session_batch(p_ops integer[], p_ids bigint[], p_session bigint) RETURNS bigint[]
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
  DECLARE
    v_valid   boolean;
    v_locks   boolean;                      -- some of it is to be locked
    v_unlocks boolean;
    v_rows    pgxlock_session_locks[];
    v_taken   boolean;
    v_done    boolean[];                    -- what the server said; later, what stays
    v_draw    bigint;
    v_tokens  bigint[];
    v_answers bigint[];
  BEGIN
    SELECT bool_and(coalesce(w.op BETWEEN 0 AND 7, false) AND w.id IS NOT NULL), bool_or(w.op & 2 = 0), bool_or(w.op & 2 = 2)
      INTO v_valid, v_locks, v_unlocks FROM unnest(p_ops, p_ids) AS w (op, id);
    IF v_valid IS FALSE OR p_session IS NULL OR p_ops IS NULL OR p_ids IS NULL THEN
      RAISE EXCEPTION 'p_session must not be NULL, and every one of p_ops must be 0 to 7 and have one of p_ids' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'a lock on a standby server excludes nobody' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'session locks are taken and given back in READ COMMITTED: an older snapshot does not show what other holders left'
        USING ERRCODE = 'active_sql_transaction';
    END IF;
    -- The first time it makes this session the one whose locks p_session marks;
    -- later it finds that it is, however often.
    IF NOT pg_try_advisory_lock(pgxlock_session_key(p_session)) THEN
      RAISE EXCEPTION 'the locks of session % are those of another connection', p_session USING ERRCODE = 'object_not_in_prerequisite_state',
        HINT = 'Draw a number for each connection. Behind a pooler that shares server connections there are no session locks.';
    END IF;

    -- Unlock: the row goes first, for without the lock it must not. Under an open
    -- fence it stays, and says that nobody shall begin another one.
    IF v_unlocks THEN
      SELECT pg_catalog.array_agg(s) INTO v_rows
        FROM unnest(p_ops, p_ids) AS w (op, id)
        JOIN pgxlock_session_locks s ON s.key_space = 1 + (w.op >> 2) AND s.key_id = w.id AND s.session = p_session
       WHERE w.op & 2 = 2 AND s.shared = (w.op & 1 = 1);
      IF v_rows IS NOT NULL AND pgxlock_session_clear(v_rows) < pg_catalog.cardinality(v_rows) THEN
        WITH left_over AS MATERIALIZED (
          SELECT s.key_space, s.key_id
            FROM pg_catalog.unnest(v_rows) r
            JOIN pgxlock_session_locks s ON s.key_space = r.key_space AND s.key_id = r.key_id AND s.session = p_session
             FOR NO KEY UPDATE OF s SKIP LOCKED
        )
        UPDATE pgxlock_session_locks s SET token = NULL FROM left_over o
         WHERE s.key_space = o.key_space AND s.key_id = o.key_id AND s.session = p_session;
      END IF;
    END IF;

    v_done := (SELECT pg_catalog.array_agg(pgxlock_session_call(w.op, w.id) ORDER BY w.n) FROM unnest(p_ops, p_ids) WITH ORDINALITY AS w (op, id, n));

    IF v_locks THEN
      -- With the lock nobody who conflicts can add a row: what is there was left by
      -- one who is gone, is just going, or is fenced still. Or it says that this
      -- session has the lock already, which the server would grant again.
      SELECT pg_catalog.array_agg(s) FILTER (WHERE s.session <> p_session OR s.token IS NULL), count(*) > 0::bigint INTO v_rows, v_taken
        FROM unnest(p_ops, p_ids, v_done) AS w (op, id, done)
        JOIN pgxlock_session_locks s ON s.key_space = 1 + (w.op >> 2) AND s.key_id = w.id
       WHERE w.done AND w.op & 2 = 0 AND (w.op & 1 = 0 OR NOT s.shared OR s.session = p_session);
      IF v_taken THEN
        PERFORM pgxlock_session_clear(v_rows);
        v_done := (
          SELECT pg_catalog.array_agg(w.done AND (w.op & 2 = 2 OR NOT EXISTS (
                   SELECT FROM pgxlock_session_locks s
                    WHERE s.key_space = 1 + (w.op >> 2) AND s.key_id = w.id
                      AND (w.op & 1 = 0 OR NOT s.shared OR s.session = p_session))
                   OR NOT pgxlock_session_call(w.op | 2, w.id)) ORDER BY w.n)         -- given back
            FROM unnest(p_ops, p_ids, v_done) WITH ORDINALITY AS w (op, id, done, n));
      END IF;

      SELECT count(*) INTO v_draw FROM unnest(p_ops, v_done) AS w (op, done) WHERE w.done AND w.op & 2 = 0;
      IF v_draw > 0::bigint THEN
        v_tokens := pgxlock_next_tokens(v_draw);
        -- What a session draws from the sequence it may find logged by another one
        -- that has not flushed it; and an unlogged table leaves nothing to flush.
        PERFORM pgxlock_durable();
        PERFORM pg_logical_emit_message(true, 'pgxlock'::text, ''::text);
      END IF;
    END IF;
    SELECT pg_catalog.array_agg(a.answer ORDER BY a.n) INTO v_answers
      FROM (SELECT w.n, CASE WHEN NOT w.done THEN NULL WHEN w.op & 2 = 2 THEN 1::bigint
                             ELSE v_tokens[(count(*) FILTER (WHERE w.done AND w.op & 2 = 0) OVER (ORDER BY w.n))::integer] END AS answer
              FROM unnest(p_ops, p_ids, v_done) WITH ORDINALITY AS w (op, id, done, n)) a;
    IF v_locks THEN
      INSERT INTO pgxlock_session_locks (key_space, key_id, session, shared, token)
      SELECT 1 + (w.op >> 2), w.id, p_session, w.op & 1 = 1, w.answer
        FROM unnest(p_ops, p_ids, v_answers) AS w (op, id, answer) WHERE w.op & 2 = 0 AND w.answer IS NOT NULL;
    END IF;
    RETURN coalesce(v_answers, '{}'::bigint[]);
  END $$;

  ------------------------------------------------------------------- fence --
  -- The pin first, the row in a later statement, as in assert_lock_held(). Last
  -- whether the session lives: one that dies frees its locks one after the other,
  -- and this one perhaps first, so that this alone would not do.
  CREATE OR REPLACE FUNCTION assert_session_lock_held(p_space integer, p_id bigint, p_session bigint, p_token bigint) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_read_committed boolean := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
    v_found boolean;
    v_timeout text;
    v_why   text;
    r       record;
  BEGIN
    IF p_space IS NULL OR p_id IS NULL OR p_session IS NULL OR p_token IS NULL THEN
      RAISE EXCEPTION 'the arguments of assert_session_lock_held() must not be NULL' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF current_setting('transaction_read_only') = 'on' THEN
      RAISE EXCEPTION 'assert_session_lock_held() protects writes, and this transaction is read-only' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Begin a READ WRITE transaction on the primary; or leave the call out, because nothing can be written here.';
    END IF;
    IF NOT pg_try_advisory_xact_lock_shared(pgxlock_session_pin(p_space, p_id, p_session)) THEN
      RAISE EXCEPTION 'session lock % is not held for this transaction: another session is taking it over, or it is just given back', p_id
        USING ERRCODE = 'LK001';
    END IF;
    IF v_read_committed THEN
      SELECT s.token INTO r FROM pgxlock_session_locks s WHERE s.key_space = p_space AND s.key_id = p_id AND s.session = p_session;
      v_found := FOUND;
    ELSE
      -- A snapshot shows the past: the row lock makes PostgreSQL compare it with
      -- the present (40001 if the row went since). It can wait for a row that
      -- somebody locked by hand after it was changed.
      v_timeout := current_setting('lock_timeout');
      PERFORM set_config('lock_timeout', '10ms', true);
      SELECT s.token INTO r FROM pgxlock_session_locks s
       WHERE s.key_space = p_space AND s.key_id = p_id AND s.session = p_session FOR KEY SHARE SKIP LOCKED;
      v_found := FOUND;
      PERFORM set_config('lock_timeout', v_timeout, true);
      IF NOT v_found THEN
        PERFORM FROM pgxlock_session_locks s WHERE s.key_space = p_space AND s.key_id = p_id AND s.session = p_session;
        IF NOT FOUND THEN
          RAISE EXCEPTION 'session lock % is not visible to this transaction''s snapshot', p_id USING ERRCODE = 'LK002',
            DETAIL = 'The snapshot is older than the acquisition, or the lock was released before it.',
            HINT = 'Acquire first, then begin the transaction, and assert in its first statement.';
        END IF;
      END IF;
    END IF;
    v_why := CASE WHEN NOT v_found AND v_read_committed THEN 'It was given back, or another session has it.'
                  WHEN NOT v_found THEN 'Somebody has its row locked.'
                  WHEN r.token IS NULL THEN 'It was given back.'
                  WHEN r.token <> p_token THEN 'It was given back, and taken again with token ' || r.token::text || '.' END;
    IF v_why IS NULL AND pg_try_advisory_xact_lock_shared(pgxlock_session_key(p_session)) THEN
      v_why := 'The session that held it has ended.';       -- and the lock that tells so ends with this transaction's failure
    END IF;
    IF v_why IS NOT NULL THEN
      RAISE EXCEPTION 'session lock % is not held', p_id USING ERRCODE = 'LK001', DETAIL = v_why;
    END IF;
    RETURN p_token;
  END $$;

  ------------------------------------------------------------ housekeeping --
  -- The liveness keys are tried shared: whoever had one exclusively would make a
  -- dead session look alive. Its own key a session always gets, so that one which
  -- has such locks itself names itself: p_session.
  CREATE OR REPLACE FUNCTION pgxlock_reap_sessions(p_limit integer DEFAULT 1000, p_session bigint DEFAULT NULL) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_rows pgxlock_session_locks[];
  BEGIN
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 THEN          -- each takes an advisory lock until commit
      RAISE EXCEPTION 'p_limit must be between 1 and 10000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    WITH sessions AS MATERIALIZED (
      SELECT DISTINCT s.session FROM pgxlock_session_locks s WHERE s.session IS DISTINCT FROM p_session
    ), dead AS MATERIALIZED (
      SELECT d.session FROM sessions d WHERE pg_try_advisory_xact_lock_shared(pgxlock_session_key(d.session))
    ), gone AS (
      SELECT s AS lock FROM pgxlock_session_locks s WHERE s.token IS NULL OR s.session IN (SELECT d.session FROM dead d) LIMIT p_limit
    )
    SELECT pg_catalog.array_agg(g.lock) INTO v_rows FROM gone g;
    RETURN pgxlock_session_clear(v_rows);
  END $$;

  ------------------------------------------------------------------ rights --
  -- Into the functions that know all of ours goes what is new here.
  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '           (NULL, ''SELECT'', ''TABLE lock_leases''',
$rights$           (true, 'EXECUTE', 'FUNCTION pgxlock_session_batch(integer[], bigint[], bigint)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION assert_session_lock_held(integer, bigint, bigint, bigint)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_reap_sessions(integer, bigint)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_session_clear(pgxlock_session_locks[])', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_session_call(integer, bigint)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_session_key(bigint)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_session_pin(integer, bigint, bigint)', '{}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_session_locks', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_session_locks', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE pgxlock_session_locks', '{administration}'::text[]),
$rights$),
      ('harden_locks()', ' IN SHARE UPDATE EXCLUSIVE', ', pgxlock_session_locks'),
      ('harden_locks()', ', ''pgxlock_tokens''', ', ''pgxlock_session_locks''')) c (signature, before, added) LOOP
    IF position(v_change.added IN pg_get_functiondef(v_change.signature::regprocedure::oid)) = 0 THEN         -- else this runs again
      EXECUTE replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.before, v_change.added || v_change.before);
    END IF;
  END LOOP;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 4::bigint;

  ---------------------------------------------------------------- comments --
  COMMENT ON TABLE pgxlock_session_locks IS 'pgxlock: session locks that were taken with pgxlock_session_batch(). A row exists from grant to unlock; what dead sessions left counts for nothing. Write it only through the functions.';
  COMMENT ON COLUMN pgxlock_session_locks.key_space IS 'As objsubid in pg_locks: 1 for a key of one bigint, 2 for one of two integers.';
  COMMENT ON COLUMN pgxlock_session_locks.key_id IS 'The key; of two integers, the first one in the high half.';
  COMMENT ON COLUMN pgxlock_session_locks.session IS 'The number that the session which holds the lock drew for itself.';
  COMMENT ON COLUMN pgxlock_session_locks.shared IS 'Several sessions may hold it, each with a row.';
  COMMENT ON COLUMN pgxlock_session_locks.token IS 'Grows with every acquisition of the key, shared ones included. NULL: it was given back while a transaction that asserted it was open, and the row goes later.';
  COMMENT ON FUNCTION assert_session_lock_held(integer, bigint, bigint, bigint) IS
    'Call it first in the transaction that writes under a session lock, on another connection than the one that holds it: raises LK001 if the session has given the lock back or ended, and until this transaction ends nobody can take the lock over by pgxlock_session_batch(). Never waits. Above READ COMMITTED LK002: the snapshot is older than the acquisition. A savepoint that is rolled back takes the protection with it.';
  COMMENT ON FUNCTION pgxlock_session_batch(integer[], bigint[], bigint) IS
    'pgxlock, internal: takes and gives back session locks, on the connection that p_session, a random number, stands for. p_ops: 0 lock, 1 lock shared, 2 unlock, 3 unlock shared, each + 4 for a key of two integers, the first in the high half of the id. Answers in order: NULL refused, else the fencing token, or 1 of an unlock. Each call in a transaction of its own. No key may be locked twice in one call. If it fails, or its transaction does, some of the locks may have been taken or given back all the same: then unlock, in another call, what was to be locked and what was to be unlocked, whatever the answers; or end the session.';
  COMMENT ON FUNCTION pgxlock_reap_sessions(integer, bigint) IS
    'Housekeeping only: removes up to p_limit rows of session locks that dead sessions left, or that were given back under a fence; returns how many. Locking never needs it.';
  COMMENT ON FUNCTION pgxlock_session_clear(pgxlock_session_locks[]) IS 'pgxlock, internal: removes rows of session locks that no fence pins.';
  COMMENT ON FUNCTION pgxlock_session_call(integer, bigint) IS 'pgxlock, internal: PostgreSQL''s advisory lock functions by number.';
  COMMENT ON FUNCTION pgxlock_session_key(bigint) IS 'pgxlock, internal: the advisory key that a session has locked for as long as it lives.';
  COMMENT ON FUNCTION pgxlock_session_pin(integer, bigint, bigint) IS 'pgxlock, internal: the advisory key that fences of a session lock share.';
  COMMENT ON FUNCTION pgxlock_schema_version() IS 'pgxlock: version of this schema.';

  -------------------------------------------------------------------- rows --
  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN             -- made in the middle of this
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 4) THEN
    RAISE EXCEPTION 'pgxlock: schema % already has a later version (%)', quote_ident(v_schema),
        (SELECT max(m.version) FROM pgxlock_migrations m)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Nothing is to be done; to go back run the down files in reverse order.';
  END IF;
  IF v_hardened THEN
    PERFORM set_config('lock_timeout', '1s', true);       -- for the tables that are in use
    PERFORM harden_locks();
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (4, false);
END $migration$;
