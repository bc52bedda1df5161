-- Fencing tokens and fences for advisory locks: the table of tokens, one call that locks and
-- unlocks many keys, the fence, and the names behind the keys. Only sessions that lock through
-- pgxlock_advisory_batch() are fenced against each other. A session that calls pg_advisory_lock()
-- excludes them but does not wait for fenced transactions: against it a fence only checks that the
-- session that locked is still alive.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the schema is known
  IF NOT EXISTS (SELECT FROM pg_proc p
                  WHERE p.oid = to_regprocedure(quote_ident(v_schema) || '.pgxlock_migrate(text, integer, text)')::oid
                                         AND pg_get_userbyid(p.proowner) = current_user) THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 1, or it belongs to another role',
        coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'insufficient_privilege',
            HINT = 'Name the schema first in search_path, SET ROLE to the owner, and run the files in order.';
  END IF;
  PERFORM set_config('search_path', format('%I, pg_temp', v_schema), true);
  PERFORM pgxlock_migrate('up'::text, 3, v_path);

  ------------------------------------------------------------------- table --
  -- A row exists from grant to unlock and is committed before the caller learns of the grant. A row
  -- that outlasts a dead session, or the unlock under a fenced transaction, is removed by the next
  -- holder or by the reaper.
  --
  -- Only the holder of the lock inserts a row, and a row is removed only while its pin is held
  -- exclusively. So without a row there is no fence to wait for, and while a row cannot be removed
  -- the lock is busy. Unlogged, because a crash ends every session too.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_advisory_locks (
    key_space integer NOT NULL,             -- as objsubid in pg_locks: 1 for one bigint, 2 for two integers
    key_id    bigint  NOT NULL,             -- of two integers, the first one in the high half
    session   bigint  NOT NULL,             -- pgxlock_session_key() makes a key of it
    shared    boolean NOT NULL,
    token     bigint,                       -- NULL: released under an open fence
    PRIMARY KEY (key_space, key_id, session)
  ) USING heap;
  ALTER TABLE pgxlock_advisory_locks SET (vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
  COMMENT ON TABLE pgxlock_advisory_locks IS
    'pgxlock: advisory locks acquired with pgxlock_advisory_batch(). Write it only through the functions. Rows: one for '
    'each lock, from grant to unlock; those of dead sessions have no effect, and pgxlock_reap_advisory() removes them.';
  COMMENT ON COLUMN pgxlock_advisory_locks.key_space IS
    'As objsubid in pg_locks: 1 for a key of one bigint, 2 for one of two integers.';
  COMMENT ON COLUMN pgxlock_advisory_locks.key_id IS 'The key; for two integers, the first one in the high half.';
  COMMENT ON COLUMN pgxlock_advisory_locks.session IS 'The number that the holding session drew for itself.';
  COMMENT ON COLUMN pgxlock_advisory_locks.shared IS 'Several sessions may hold it, each with a row.';
  COMMENT ON COLUMN pgxlock_advisory_locks.token IS
    'Grows with every acquisition of the key, also shared ones. NULL: released while a transaction that asserted it was '
    'open; the row is removed later.';

  ------------------------------------------------------------ lock, unlock --
  -- Nothing here waits for a lock, a row or another transaction.
  CREATE OR REPLACE FUNCTION pgxlock_advisory_batch(p_ops integer[], p_ids bigint[], p_session bigint) RETURNS bigint[]
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
  DECLARE
    v_valid   boolean;
    v_locks   boolean;                      -- some entries lock
    v_unlocks boolean;
    v_rows    pgxlock_advisory_locks[];
    v_taken   boolean;
    v_done    boolean[];                    -- what the server did; later, what is kept
    v_draw    bigint;
    v_tokens  bigint[];
    v_answers bigint[];
  BEGIN
    SELECT bool_and(coalesce(w.op BETWEEN 0 AND 7, false) AND w.id IS NOT NULL), bool_or(w.op & 2 = 0), bool_or(w.op & 2 = 2)
      INTO v_valid, v_locks, v_unlocks FROM unnest(p_ops, p_ids) AS w (op, id);
    IF (v_valid IS NOT FALSE
        AND p_session IS NOT NULL
        AND pg_catalog.cardinality(p_ops) <= 10000
        AND pg_catalog.cardinality(p_ids) <= 10000) IS NOT TRUE THEN
      PERFORM pgxlock_require(false,
                              'p_session must not be NULL, p_ops and p_ids must have at most 10000 elements, and every '
                              'one of p_ops must be 0 to 7 and have one of p_ids');
    END IF;
    IF pg_is_in_recovery() THEN
      PERFORM pgxlock_check_primary('a lock on a standby server excludes nobody');
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      PERFORM pgxlock_check_read_committed('advisory locks are acquired and released in READ COMMITTED: an older snapshot '
                                           'does not show what other holders left');
    END IF;
    -- The first call makes this session the one that p_session stands for. Every later call gets
    -- the key again.
    IF NOT pg_try_advisory_lock(pgxlock_session_key(p_session)) THEN
      RAISE EXCEPTION 'the locks of session % are those of another connection', p_session
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Draw a number for each connection. Behind a pooler that shares server connections advisory locks do '
                     'not work.';
    END IF;

    -- Unlock: the row is removed first, because without the lock it must not be. Under an open
    -- fence it stays, with a NULL token that refuses further fences.
    IF v_unlocks THEN
      SELECT pg_catalog.array_agg(s) INTO v_rows
        FROM unnest(p_ops, p_ids, pg_catalog.array_fill(p_session, ARRAY[pg_catalog.cardinality(p_ops)])) AS w (op, id, session)
        JOIN pgxlock_advisory_locks s ON s.key_space = 1 + (w.op >> 2) AND s.key_id = w.id AND s.session = w.session
       WHERE w.op & 2 = 2 AND s.shared = (w.op & 1 = 1);
      IF v_rows IS NOT NULL AND pgxlock_clear_advisory(v_rows) < pg_catalog.cardinality(v_rows) THEN
        WITH left_over AS MATERIALIZED (
          SELECT s.key_space, s.key_id, s.session
            FROM pg_catalog.unnest(v_rows) r
            JOIN pgxlock_advisory_locks s ON s.key_space = r.key_space AND s.key_id = r.key_id AND s.session = r.session
             FOR NO KEY UPDATE OF s SKIP LOCKED
        )
        UPDATE pgxlock_advisory_locks s SET token = NULL FROM left_over o
         WHERE s.key_space = o.key_space AND s.key_id = o.key_id AND s.session = o.session;
      END IF;
    END IF;

    v_done := (SELECT pg_catalog.array_agg(pgxlock_advisory_call(w.op, w.id) ORDER BY w.n)
                 FROM unnest(p_ops, p_ids) WITH ORDINALITY AS w (op, id, n));

    IF v_locks THEN
      -- While the lock is held, no conflicting session can add a row. An existing row belongs to a
      -- session that is gone, going or still fenced; or it shows that this session has the lock
      -- already, which the server would grant again.
      SELECT pg_catalog.array_agg(s) FILTER (WHERE s.session <> p_session OR s.token IS NULL), count(*) > 0::bigint
        INTO v_rows, v_taken
        FROM unnest(p_ops, p_ids, v_done) AS w (op, id, done)
        JOIN pgxlock_advisory_locks s ON s.key_space = 1 + (w.op >> 2) AND s.key_id = w.id
       WHERE w.done AND w.op & 2 = 0 AND (w.op & 1 = 0 OR NOT s.shared OR s.session = p_session);
      IF v_taken THEN
        PERFORM pgxlock_clear_advisory(v_rows);
        v_done := (
          SELECT pg_catalog.array_agg(w.done AND (w.op & 2 = 2 OR NOT EXISTS (
                   SELECT FROM pgxlock_advisory_locks s
                    WHERE s.key_space = 1 + (w.op >> 2) AND s.key_id = w.id
                      AND (w.op & 1 = 0 OR NOT s.shared OR s.session = p_session))
                   OR NOT pgxlock_advisory_call(w.op | 2, w.id)) ORDER BY w.n)         -- released
            FROM unnest(p_ops, p_ids, v_done) WITH ORDINALITY AS w (op, id, done, n));
      END IF;

      SELECT count(*) INTO v_draw FROM unnest(p_ops, v_done) AS w (op, done) WHERE w.done AND w.op & 2 = 0;
      IF v_draw > 0::bigint THEN
        v_tokens := pgxlock_next_tokens(v_draw);
        -- The message makes the commit flush: another session may have logged the drawn values
        -- without flushing them, and an unlogged table leaves nothing to flush.
        PERFORM pgxlock_durable(true);
        PERFORM pg_logical_emit_message(true, 'pgxlock'::text, ''::text);
      END IF;
    END IF;
    SELECT pg_catalog.array_agg(a.answer ORDER BY a.n) INTO v_answers
      FROM (SELECT w.n, CASE WHEN NOT w.done THEN NULL WHEN w.op & 2 = 2 THEN 1::bigint
                             ELSE v_tokens[(count(*) FILTER (WHERE w.done AND w.op & 2 = 0)
                                              OVER (ORDER BY w.n))::integer] END AS answer
              FROM unnest(p_ops, p_ids, v_done) WITH ORDINALITY AS w (op, id, done, n)) a;
    IF v_locks THEN
      INSERT INTO pgxlock_advisory_locks (key_space, key_id, session, shared, token)
      SELECT 1 + (w.op >> 2), w.id, p_session, w.op & 1 = 1, w.answer
        FROM unnest(p_ops, p_ids, v_answers) AS w (op, id, answer) WHERE w.op & 2 = 0 AND w.answer IS NOT NULL;
    END IF;
    RETURN coalesce(v_answers, '{}'::bigint[]);
  END $$;
  COMMENT ON FUNCTION pgxlock_advisory_batch(integer[], bigint[], bigint) IS
    'pgxlock, internal: locks and unlocks advisory locks, on the connection that p_session, a random number, stands for. '
    'p_ops: 0 lock, 1 lock shared, 2 unlock, 3 unlock shared; 4 more for a key of two integers, the first in the high '
    'half of the id. Answers in order: NULL if refused, else the fencing token, or 1 for an unlock. Each call in a '
    'transaction of its own, with each key locked at most once. If the call or its transaction fails, some of the locks '
    'may have been acquired or released all the same: then unlock all keys of the call in another one, whatever the '
    'answers, or end the session.';

  CREATE OR REPLACE FUNCTION pgxlock_advisory_call(p_op integer, p_id bigint) RETURNS boolean
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
  COMMENT ON FUNCTION pgxlock_advisory_call(integer, bigint) IS
    'pgxlock, internal: PostgreSQL''s advisory lock functions, by the numbers of p_ops in pgxlock_advisory_batch().';

  CREATE OR REPLACE FUNCTION pgxlock_clear_advisory(p_rows pgxlock_advisory_locks[]) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
  DECLARE
    v_count bigint;
  BEGIN
    WITH pinned AS MATERIALIZED (
      SELECT r.key_space, r.key_id, r.session, r.token FROM pg_catalog.unnest(p_rows) r
       WHERE pg_try_advisory_xact_lock(pgxlock_advisory_pin(r.key_space, r.key_id, r.session))
    ), locked AS MATERIALIZED (
      SELECT s.key_space, s.key_id, s.session
        FROM pinned p
        JOIN pgxlock_advisory_locks s ON s.key_space = p.key_space AND s.key_id = p.key_id AND s.session = p.session
       WHERE coalesce(s.token = p.token, s.token IS NULL AND p.token IS NULL)
         FOR UPDATE OF s SKIP LOCKED
    )
    DELETE FROM pgxlock_advisory_locks s USING locked k
     WHERE s.key_space = k.key_space AND s.key_id = k.key_id AND s.session = k.session;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
  END $$;
  COMMENT ON FUNCTION pgxlock_clear_advisory(pgxlock_advisory_locks[]) IS
    'pgxlock, internal: removes those of p_rows that are unchanged, not locked and not pinned by a fence; returns how many.';

  -- Liveness keys are tried shared: an exclusive lock would make a dead session look alive. A
  -- session always gets its own key, so a caller that holds such locks names itself: p_session.
  CREATE OR REPLACE FUNCTION pgxlock_reap_advisory(p_limit integer DEFAULT 1000, p_session bigint DEFAULT NULL) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_rows pgxlock_advisory_locks[];
  BEGIN
    PERFORM pgxlock_require(p_limit BETWEEN 1 AND 10000, 'p_limit must be between 1 and 10000');
    -- To ask about a session takes a lock, for which the server has room for so many. Any of them: the
    -- first ones may all live.
    WITH sessions AS MATERIALIZED (
      SELECT d.session
        FROM (SELECT DISTINCT s.session FROM pgxlock_advisory_locks s WHERE s.session IS DISTINCT FROM p_session) d
       ORDER BY random()
       LIMIT 1000
    ), dead AS MATERIALIZED (
      SELECT d.session FROM sessions d WHERE pg_try_advisory_xact_lock_shared(pgxlock_session_key(d.session))
    ), gone AS (
      SELECT s AS lock FROM pgxlock_advisory_locks s
       WHERE s.token IS NULL OR s.session IN (SELECT d.session FROM dead d)
       LIMIT p_limit
    )
    SELECT pg_catalog.array_agg(g.lock) INTO v_rows FROM gone g;
    RETURN pgxlock_clear_advisory(v_rows);
  END $$;
  COMMENT ON FUNCTION pgxlock_reap_advisory(integer, bigint) IS
    'Housekeeping only: removes rows of advisory locks that dead sessions left or that were released under a fence. At most '
    'p_limit, and of 1000 sessions; returns how many. Locking never needs it.';

  ------------------------------------------------------------------- fence --
  -- The pin is acquired first and the row read in a later statement, as in assert_lock_held(). The
  -- liveness of the session is checked last, and would not be enough alone: a dying session frees
  -- its locks one by one, perhaps this one first.
  CREATE OR REPLACE FUNCTION assert_advisory_lock_held(p_space integer, p_id bigint, p_session bigint, p_token bigint)
  RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_read_committed boolean := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
    v_found boolean;
    v_timeout text;
    v_why   text;
    r       record;
  BEGIN
    PERFORM pgxlock_require(p_space IS NOT NULL AND p_id IS NOT NULL AND p_session IS NOT NULL AND p_token IS NOT NULL,
                            'the arguments of assert_advisory_lock_held() must not be NULL');
    IF current_setting('transaction_read_only') = 'on' THEN
      RAISE EXCEPTION 'assert_advisory_lock_held() protects writes, and this transaction is read-only'
        USING ERRCODE = 'read_only_sql_transaction',
              HINT = 'Begin a READ WRITE transaction on the primary; or leave the call out, because nothing can be written here.';
    END IF;
    IF NOT pg_try_advisory_xact_lock_shared(pgxlock_advisory_pin(p_space, p_id, p_session)) THEN
      RAISE EXCEPTION 'advisory lock % is not held for this transaction: another session is taking it over, or it is '
                      'being released',
          p_id
        USING ERRCODE = 'LK001';
    END IF;
    IF v_read_committed THEN
      SELECT s.token INTO r FROM pgxlock_advisory_locks s
       WHERE s.key_space = p_space AND s.key_id = p_id AND s.session = p_session;
      v_found := FOUND;
    ELSE
      -- The row lock makes PostgreSQL compare the snapshot with the present row (40001 if it was
      -- removed since). It can wait for a changed row that was locked by hand: the wait is bounded.
      v_timeout := current_setting('lock_timeout');
      PERFORM set_config('lock_timeout', '10ms', true);
      SELECT s.token INTO r FROM pgxlock_advisory_locks s
       WHERE s.key_space = p_space AND s.key_id = p_id AND s.session = p_session FOR KEY SHARE SKIP LOCKED;
      v_found := FOUND;
      PERFORM set_config('lock_timeout', v_timeout, true);
      IF NOT v_found THEN
        PERFORM FROM pgxlock_advisory_locks s WHERE s.key_space = p_space AND s.key_id = p_id AND s.session = p_session;
        IF NOT FOUND THEN
          RAISE EXCEPTION 'advisory lock % is not visible to this transaction''s snapshot', p_id USING ERRCODE = 'LK002',
            DETAIL = 'The snapshot is older than the acquisition, or the lock was released before it.',
            HINT = 'Acquire first, then begin the transaction, and assert in its first statement.';
        END IF;
      END IF;
    END IF;
    v_why := CASE WHEN NOT v_found AND v_read_committed THEN 'It was released, or another session holds it.'
                  WHEN NOT v_found THEN 'Another transaction has its row locked.'
                  WHEN r.token IS NULL THEN 'It was released.'
                  WHEN r.token <> p_token THEN 'It was released, and acquired again with token ' || r.token::text || '.' END;
    IF v_why IS NULL AND pg_try_advisory_xact_lock_shared(pgxlock_session_key(p_session)) THEN
      v_why := 'The session that held it has ended.';       -- this transaction fails, which also ends the lock just acquired
    END IF;
    IF v_why IS NOT NULL THEN
      RAISE EXCEPTION 'advisory lock % is not held', p_id USING ERRCODE = 'LK001', DETAIL = v_why;
    END IF;
    RETURN p_token;
  END $$;
  COMMENT ON FUNCTION assert_advisory_lock_held(integer, bigint, bigint, bigint) IS
    'Call it first in the transaction that writes under an advisory lock. Use another connection than the one that holds '
    'it. Returns p_token; raises LK001 if the session has released the lock or ended and, above READ COMMITTED, LK002 if '
    'the snapshot is older than the acquisition. Until this transaction ends no session can take the lock over through '
    'pgxlock_advisory_batch(). Waits for no other function of pgxlock. Rolling back to a savepoint before the call ends '
    'the protection.';

  -------------------------------------------------------------------- keys --
  -- Unlike the keys of leases these do not contain the table: all installations in a database share
  -- the advisory locks. IMMUTABLE as pgxlock_waiter_key().
  --
  -- Where the key of another session equals this one (see pgxlock_key() for the odds): while that
  -- session lives, this one is refused it. A Locker then draws another number with its next
  -- connection. After this one is dead it seems to live: its rows stay until the other session has
  -- ended, and a fence of its locks passes if the lock was not taken over. As every fence that one
  -- keeps the lock from callers that lock with tokens; it does not notice pg_advisory_lock().
  CREATE OR REPLACE FUNCTION pgxlock_session_key(p_session bigint) RETURNS bigint
  LANGUAGE sql IMMUTABLE PARALLEL SAFE
  RETURN pgxlock_own_key(true, decode('0073657373696f6e00', 'hex') || int8send(p_session));         -- session, between zero bytes
  COMMENT ON FUNCTION pgxlock_session_key(bigint) IS
    'pgxlock, internal: the liveness key, which a session holds exclusively for as long as it lives.';

  -- Where another key equals it, the lock is busy, or a fence of it fails, as of a lease: see
  -- pgxlock_key().
  CREATE OR REPLACE FUNCTION pgxlock_advisory_pin(p_space integer, p_id bigint, p_session bigint) RETURNS bigint
  LANGUAGE sql STABLE PARALLEL SAFE
  RETURN pgxlock_own_key(false, decode('00', 'hex') || convert_to('session pin', 'UTF8'::name) || decode('00', 'hex')
      || int4send(p_space) || int8send(p_id) || int8send(p_session));
  COMMENT ON FUNCTION pgxlock_advisory_pin(integer, bigint, bigint) IS
    'pgxlock, internal: the pin of a row, which fences of an advisory lock hold shared.';

  ------------------------------------------------------------------- names --
  -- The server knows only the number of an advisory key. A row says that a session held the key
  -- recently; pg_locks says which one holds it now. Unlogged, because names are published again.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_names (
    key_id  bigint PRIMARY KEY,
    name    text COLLATE "C" NOT NULL,
    held_at timestamptz NOT NULL
  ) USING heap;
  CREATE INDEX IF NOT EXISTS pgxlock_names_held_at ON pgxlock_names (held_at);
  COMMENT ON TABLE pgxlock_names IS
    'pgxlock: names of advisory keys that were held for some seconds within the last hour. Write it only through the '
    'function. Rows: one for each key; the next names that are published remove older ones.';
  COMMENT ON COLUMN pgxlock_names.key_id IS
    'advisory_lock_key(name); for a name of the form @namespace/name it may be advisory_lock_key_in(namespace, name).';
  COMMENT ON COLUMN pgxlock_names.held_at IS 'When a holder last published it.';

  -- Names not published for an hour are removed: the table has only keys that are held long.
  CREATE OR REPLACE FUNCTION pgxlock_publish_names(p_names text[], p_namespaces text[] DEFAULT NULL) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET lock_timeout = '100ms' AS $$
  BEGIN
    IF (pg_catalog.cardinality(p_names) <= 1000) IS NOT TRUE
       OR p_namespaces IS NOT NULL AND pg_catalog.cardinality(p_namespaces) <> pg_catalog.cardinality(p_names)
       OR EXISTS (SELECT FROM unnest(p_names, p_namespaces) w (name, namespace)
                   WHERE (char_length(w.name) BETWEEN 1 AND 255
                          AND char_length(w.name) + coalesce(char_length(w.namespace) + 2, 0) <= 255) IS NOT TRUE) THEN
      RAISE EXCEPTION 'p_names must have up to 1000 names of 1 to 255 characters, @, the namespace and / included'
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pgxlock_check_primary('nothing is published on a standby server');
    INSERT INTO pgxlock_names AS k (key_id, name, held_at)
    SELECT DISTINCT ON (w.id) w.id, w.name, clock_timestamp()
      FROM (SELECT coalesce(advisory_lock_key_in(u.namespace, u.name), advisory_lock_key(u.name)) AS id,
                   coalesce('@' || u.namespace || '/', '') || u.name AS name
              FROM unnest(p_names, p_namespaces) u (name, namespace)) w
     ORDER BY w.id
    ON CONFLICT ON CONSTRAINT pgxlock_names_pkey DO UPDATE SET name = excluded.name, held_at = excluded.held_at;
    IF pg_try_advisory_xact_lock(pgxlock_key('names', '')) THEN              -- one cleaner is enough
      WITH old AS MATERIALIZED (
        SELECT k.key_id FROM pgxlock_names k
         WHERE k.key_id = ANY (ARRAY(SELECT o.key_id FROM pgxlock_names o
                                      WHERE o.held_at < clock_timestamp() - interval '1 hour'
                                      ORDER BY o.held_at
                                      LIMIT 2000))
           AND k.held_at < clock_timestamp() - interval '1 hour'
         ORDER BY k.key_id
           FOR UPDATE OF k SKIP LOCKED
      )
      DELETE FROM pgxlock_names k USING old o WHERE k.key_id = o.key_id;
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_publish_names(text[], text[]) IS
    'pgxlock, internal: publishes the names of advisory keys that are held, those in a namespace as @namespace/name.';

  PERFORM pgxlock_migrate('made'::text, 3, v_path);
END $migration$;
