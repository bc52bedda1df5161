-- Runs: work that starts once per period, or once per tick of a schedule. A row of pgxlock_runs is
-- one start, and keeps every other caller from starting it again.
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
  PERFORM pgxlock_migrate('up'::text, 6, v_path);

  ------------------------------------------------------------------- table --
  -- A run is one start of a key in one slot: a period of the server's clock, named by its
  -- beginning, or a tick that the caller gives.
  CREATE TABLE IF NOT EXISTS pgxlock_runs (
    run_key     varchar(255) COLLATE "C" NOT NULL,
    slot        timestamptz NOT NULL,
    state       text NOT NULL,              -- running, succeeded, failed; withdrawn: the start was undone; skipped: see p_first
    attempt     integer NOT NULL,
    holder      text NOT NULL,              -- unique to the attempt
    lease       text,                       -- the lease that the run holds; NULL: none, so the run is never considered dead
    started_at  timestamptz NOT NULL,
    finished_at timestamptz,
    error       text,
    keep_until  timestamptz NOT NULL,
    period      interval,                   -- of the program that started it; NULL: a tick
    period_offset interval,
    time_zone   text,
    PRIMARY KEY (run_key, slot)
  ) USING heap;
  ALTER TABLE pgxlock_runs SET (vacuum_truncate = off);            -- truncating would block starts
  CREATE INDEX IF NOT EXISTS pgxlock_runs_keep_until ON pgxlock_runs (keep_until);
  COMMENT ON TABLE pgxlock_runs IS
    'pgxlock: the runs started for each period or tick. A row keeps other callers from starting the run again. Write it '
    'only through the functions. Rows: one for each run; later starts remove those after keep_until.';
  COMMENT ON COLUMN pgxlock_runs.slot IS 'The beginning of the period; or the tick that the caller gave.';
  COMMENT ON COLUMN pgxlock_runs.state IS
    'running, succeeded or failed; withdrawn: the start was undone, and any caller may start it; skipped: it was under way when '
    'the key was first asked for with p_first next. A running one whose lease has no holder has crashed.';
  COMMENT ON COLUMN pgxlock_runs.attempt IS 'The number of starts.';
  COMMENT ON COLUMN pgxlock_runs.holder IS 'The name that the last caller to start it gave itself, with an id of the attempt.';
  COMMENT ON COLUMN pgxlock_runs.lease IS
    'The lease in distributed_locks that the run holds; NULL: none, so that a crash cannot be detected, and the run is '
    'not started again.';
  COMMENT ON COLUMN pgxlock_runs.error IS 'The error that the run reported.';
  COMMENT ON COLUMN pgxlock_runs.period IS 'The period of the program that started the run; NULL: slot is a tick.';
  COMMENT ON COLUMN pgxlock_runs.period_offset IS 'How much later than at a multiple of the period it begins.';
  COMMENT ON COLUMN pgxlock_runs.time_zone IS 'The time zone in which a period of whole days begins.';

  ---------------------------------------------------------- callers in SQL --
  CREATE OR REPLACE FUNCTION start_run(
    p_key text, p_period interval, p_offset interval DEFAULT '0', p_time_zone text DEFAULT 'UTC', p_first text DEFAULT 'now')
  RETURNS timestamptz
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    r record;
  BEGIN
    PERFORM pgxlock_require(p_period IS NOT NULL, 'p_period must not be NULL');
    SELECT s.slot, s.attempt INTO r
      FROM pgxlock_start_run(p_key, NULL::timestamptz, p_period, p_offset, p_time_zone,
                             LEAST(GREATEST(interval '7 days', 3::float8 * p_period), interval '100 years'),
                             pg_catalog.format('%s:%s:%s', left(session_user::text, 63), pg_backend_pid(), gen_random_uuid()),
                             NULL::text, p_first) s;
    RETURN CASE WHEN r.attempt IS NOT NULL THEN r.slot END;
  END $$;
  COMMENT ON FUNCTION start_run(text, interval, interval, text, text) IS
    'The beginning of the current period for exactly one caller in each period, by the server''s clock; NULL for all others, for '
    'good. In a transaction of its own that commits before the work begins. Periods of whole days begin at midnight plus '
    'p_offset by the clocks of p_time_zone, and weeks on Monday; other periods divide the time since the year 1, plus p_offset. '
    'With p_first ''next'' a key of which nothing is recorded begins with the next period, and not ''now''.';

  CREATE OR REPLACE FUNCTION start_run_at(p_key text, p_tick timestamptz) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN (SELECT s.attempt IS NOT NULL
              FROM pgxlock_start_run(p_key, p_tick, NULL::interval, NULL::interval, NULL::text, interval '7 days',
                                     pg_catalog.format('%s:%s:%s', left(session_user::text, 63), pg_backend_pid(),
                                                       gen_random_uuid()), NULL::text, 'now') s);
  END $$;
  COMMENT ON FUNCTION start_run_at(text, timestamptz) IS
    'start_run() for a tick of a schedule: true for exactly one caller for each tick. Raises 22023 for a tick more than 7 '
    'days old or ahead.';

  CREATE OR REPLACE FUNCTION finish_run(p_key text, p_slot timestamptz, p_error text DEFAULT NULL) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    UPDATE pgxlock_runs o
       SET state = CASE WHEN p_error IS NULL THEN 'succeeded' ELSE 'failed' END, finished_at = clock_timestamp(),
           error = left(p_error, 2000)
     WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = p_slot AND o.state = 'running' AND o.lease IS NULL;
    RETURN FOUND;
  END $$;
  COMMENT ON FUNCTION finish_run(text, timestamptz, text) IS
    'Records the end of a run that start_run() or start_run_at() started; p_error NULL: it succeeded. False if it was not '
    'running. For operators: start_run() never starts the run again, whatever is recorded; a program that retries failed '
    'runs may.';

  CREATE OR REPLACE FUNCTION forget_run(p_key text, p_slot timestamptz) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    DELETE FROM pgxlock_runs o WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = p_slot;
    RETURN FOUND;
  END $$;
  COMMENT ON FUNCTION forget_run(text, timestamptz) IS
    'Removes the record of a run, so that it can be started again; false if there was none.';

  CREATE OR REPLACE FUNCTION list_runs(p_key text DEFAULT NULL, p_limit integer DEFAULT 100)
  RETURNS TABLE (run_key text, slot timestamptz, state text, attempt integer, holder text, lease text, started_at timestamptz,
                 finished_at timestamptz, error text, period interval, period_offset interval, time_zone text)
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET row_security = off SET jit = off AS $$
  BEGIN
    IF p_key IS NOT NULL THEN
      PERFORM pgxlock_check('p_key', p_key);
    END IF;
    PERFORM pgxlock_require(p_limit BETWEEN 1 AND 10000, 'p_limit must be between 1 and 10000');
    RETURN QUERY
    SELECT o.run_key::text, o.slot,
           CASE WHEN o.state = 'running' AND o.lease IS NOT NULL
                 AND NOT EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = o.lease COLLATE "C"
                                    AND l.holder_id::text = o.holder COLLATE "C" AND l.expires_at > clock_timestamp())
                THEN 'abandoned' ELSE o.state END,
           o.attempt, o.holder, o.lease, o.started_at, o.finished_at, o.error, o.period, o.period_offset, o.time_zone
      FROM pgxlock_runs o
     WHERE (p_key IS NULL OR o.run_key::text = p_key COLLATE "C") AND o.state <> 'withdrawn'
       -- as programs can read it: a role that may write the table could hide all others behind infinity
       AND o.slot BETWEEN '0001-01-01 00:00+00'::timestamptz AND '9999-12-31 00:00+00'::timestamptz
     ORDER BY o.slot DESC, o.run_key
     LIMIT p_limit;
  END $$;
  COMMENT ON FUNCTION list_runs(text, integer) IS
    'The recorded runs of a key, or of all keys, the latest periods and ticks first. state: running, succeeded, failed, skipped, '
    'or abandoned: its process has died or was cut off, and it may be started again. A run without a lease stays running when '
    'its process has died.';

  ----------------------------------------------------------------- Lockers --
  -- Where p_offset or p_time_zone changes, the periods begin elsewhere, and the one that is under way
  -- was perhaps run under its former beginning. So a period is not run if one with another beginning
  -- was that begins later, or less than half a period earlier: the next run comes half a period to
  -- one and a half after the last. What starts in the same moment does not see one another.
  CREATE OR REPLACE FUNCTION pgxlock_run_near(
    p_key text, p_slot timestamptz, p_period interval, p_offset interval, p_time_zone text, p_retry boolean, p_first text,
    OUT blocks boolean, OUT other_period interval, OUT other_offset interval, OUT other_zone text)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    SELECT coalesce(o.slot <> p_slot AND o.period = p_period
                    AND NOT (o.state = 'skipped' AND p_first = 'now' OR o.state = 'failed' AND p_retry), false),
           coalesce(o.period, interval '0'), coalesce(o.period_offset, interval '0'), coalesce(o.time_zone, '')
      INTO blocks, other_period, other_offset, other_zone
      FROM pgxlock_runs o
     WHERE o.run_key::text = p_key COLLATE "C" AND o.slot > p_slot - p_period / 2::float8 AND o.state <> 'withdrawn'
       AND (o.period IS DISTINCT FROM p_period OR o.period_offset <> p_offset OR o.time_zone <> p_time_zone COLLATE "C")
     ORDER BY 1 DESC LIMIT 1;
    blocks := coalesce(blocks, false);
  END $$;
  COMMENT ON FUNCTION pgxlock_run_near(text, timestamptz, interval, interval, text, boolean, text) IS
    'pgxlock, internal: with which period, offset and time zone another program has started a run near the slot; NULL: none, 0: '
    'for a tick. blocks: so that the run of the slot may not be started, because only the offset or the time zone differs.';

  CREATE OR REPLACE FUNCTION pgxlock_due_runs(
    p_key text, p_period interval, p_offset interval, p_time_zone text, p_missed integer, p_retry boolean,
    p_first text DEFAULT 'now')
  RETURNS TABLE (slot timestamptz, due boolean, lasts bigint, other_period interval, other_offset interval, other_zone text)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_now  timestamptz := clock_timestamp();
    v_near record;
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    PERFORM pgxlock_require(p_missed BETWEEN 0 AND 1000 AND p_retry IS NOT NULL,
                            'p_missed must be between 0 and 1000, and p_retry not NULL');
    PERFORM pgxlock_require(p_first IN ('now', 'next'), 'p_first must be now or next');
    PERFORM pgxlock_check_primary('runs are not started on a standby server');
    FOR i IN -p_missed..0 LOOP
      slot := pgxlock_slot(v_now, p_period, p_offset, p_time_zone, i);
      SELECT n.blocks, n.other_period, n.other_offset, n.other_zone INTO v_near
        FROM pgxlock_run_near(p_key, slot, p_period, p_offset, p_time_zone, p_retry, p_first) n;
      other_period := v_near.other_period;
      other_offset := v_near.other_offset;
      other_zone := v_near.other_zone;
      due := NOT v_near.blocks AND NOT EXISTS (
        SELECT FROM pgxlock_runs r WHERE r.run_key::text = p_key COLLATE "C" AND r.slot = pgxlock_due_runs.slot
           AND NOT (r.state = 'withdrawn' OR r.state = 'skipped' AND p_first = 'now'
                    OR p_retry AND (r.state = 'failed' OR r.state = 'running' AND r.lease IS NOT NULL)));
      IF i = 0 THEN
        lasts := (extract(epoch FROM pgxlock_slot(v_now, p_period, p_offset, p_time_zone, 1) - v_now) * 1000000::numeric)::bigint;
        RETURN NEXT;
      ELSIF due
         AND EXISTS (SELECT FROM pgxlock_runs r
                      WHERE r.run_key::text = p_key COLLATE "C" AND r.slot <= pgxlock_due_runs.slot) THEN
        RETURN NEXT;
      END IF;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION pgxlock_due_runs(text, interval, interval, text, integer, boolean, text) IS
    'pgxlock, internal: the missed slots, oldest first, among the p_missed before the current one and since the first recorded '
    'one; then the current slot. due: it may be started. lasts: microseconds until the next slot begins. other_period, '
    'other_offset and other_zone: as pgxlock_run_near() says.';

  -- With a lease, which p_holder must hold, a failed run may be started again, and so may a running
  -- one that was started under the same lease: its holder is dead.
  -- p_period is NULL for a tick.
  CREATE OR REPLACE FUNCTION pgxlock_start_run(
    p_key text, p_slot timestamptz, p_period interval, p_offset interval, p_time_zone text, p_keep interval,
    p_holder text, p_lease text,
    p_first text DEFAULT 'now',
    OUT slot timestamptz, OUT attempt integer, OUT other_period interval, OUT other_offset interval, OUT other_zone text)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_keep interval;
    v_now  timestamptz;
    v_mine boolean;
    v_near record;
    r      record;
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    PERFORM pgxlock_check('p_holder', p_holder);
    PERFORM pgxlock_require(p_first IN ('now', 'next'), 'p_first must be now or next');
    v_keep := pgxlock_ttl('p_keep', p_keep);
    PERFORM pgxlock_check_primary('cannot start a run on a standby server');
    v_now := clock_timestamp();
    slot := p_slot;
    IF p_period IS NOT NULL THEN
      slot := pgxlock_slot(coalesce(p_slot, v_now), p_period, p_offset, p_time_zone, 0);
    END IF;
    IF slot IS NULL OR NOT isfinite(slot) THEN
      RAISE EXCEPTION 'p_slot must be a finite time, it is %', coalesce(slot::text, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF slot > v_now + v_keep THEN
      RAISE EXCEPTION 'the slot % is further ahead than runs are kept, %', slot, p_keep
        USING ERRCODE = 'invalid_parameter_value', HINT = 'Give the tick of a run that is due now; is it in the right unit?';
    END IF;

    -- Plain reads: most calls find the run started, and write nothing.
    SELECT o.state, o.holder, o.lease, o.attempt INTO r FROM pgxlock_runs o
     WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = pgxlock_start_run.slot;
    v_mine := FOUND AND r.state = 'running' AND r.holder = p_holder COLLATE "C";
    IF p_period IS NOT NULL THEN
      SELECT n.blocks, n.other_period, n.other_offset, n.other_zone INTO v_near
        FROM pgxlock_run_near(p_key, slot, p_period, p_offset, p_time_zone, p_lease IS NOT NULL, p_first) n;
      other_period := v_near.other_period;
      other_offset := v_near.other_offset;
      other_zone := v_near.other_zone;
      IF v_near.blocks AND NOT v_mine THEN
        RETURN;
      ELSIF p_first = 'next' AND r.state IS NULL
            AND NOT EXISTS (SELECT FROM pgxlock_runs o WHERE o.run_key::text = p_key COLLATE "C") THEN
        INSERT INTO pgxlock_runs (run_key, slot, state, attempt, holder, started_at, keep_until, period, period_offset, time_zone)
        VALUES (p_key, slot, 'skipped', 0, p_holder, v_now, GREATEST(slot, v_now) + v_keep, p_period, p_offset, p_time_zone)
        ON CONFLICT ON CONSTRAINT pgxlock_runs_pkey DO NOTHING;
        RETURN;
      END IF;
    END IF;
    IF r.state IS NOT NULL AND NOT (v_mine OR r.state = 'withdrawn' OR r.state = 'skipped' AND p_first = 'now'
                                    OR p_lease IS NOT NULL AND (r.state = 'failed'
                                                                OR r.state = 'running' AND r.lease = p_lease COLLATE "C")) THEN
      RETURN;
    END IF;
    PERFORM pgxlock_durable(true);
    IF p_lease IS NOT NULL THEN
      PERFORM assert_lock_held(p_lease::varchar, p_holder::varchar, NULL::bigint, false);
    END IF;
    IF v_mine THEN                          -- an answer was lost; perhaps that commit was not replicated, so commit once more
      UPDATE pgxlock_runs o SET started_at = clock_timestamp()
       WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = pgxlock_start_run.slot AND o.state = 'running'
         AND o.holder = p_holder COLLATE "C"
      RETURNING o.attempt INTO attempt;     -- NULL: the run was forgotten meanwhile
      RETURN;
    END IF;
    INSERT INTO pgxlock_runs AS o (run_key, slot, state, attempt, holder, lease, started_at, keep_until,
                                   period, period_offset, time_zone)
    VALUES (p_key, slot, 'running', 1, p_holder, p_lease, clock_timestamp(), GREATEST(slot, v_now) + v_keep,
            p_period, CASE WHEN p_period IS NOT NULL THEN p_offset END, CASE WHEN p_period IS NOT NULL THEN p_time_zone END)
    ON CONFLICT ON CONSTRAINT pgxlock_runs_pkey
    DO UPDATE SET state = 'running', attempt = o.attempt + CASE o.state WHEN 'withdrawn' THEN 0 ELSE 1 END,
                  holder = excluded.holder, lease = excluded.lease, started_at = excluded.started_at,
                  finished_at = NULL, error = NULL, keep_until = excluded.keep_until,
                  period = excluded.period, period_offset = excluded.period_offset, time_zone = excluded.time_zone
     WHERE o.state = 'withdrawn' OR o.state = 'skipped' AND p_first = 'now'
        OR p_lease IS NOT NULL AND (o.state = 'failed' OR o.state = 'running' AND o.lease = p_lease COLLATE "C")
    RETURNING o.attempt INTO attempt;
    IF NOT FOUND THEN
      RETURN;
    END IF;
    -- Read after the row is locked: the row of a slot that is young enough now was never removed.
    v_now := clock_timestamp();
    IF slot < v_now - v_keep THEN
      RAISE EXCEPTION 'the slot % is older than what is kept, %: whether it was run is not known any more', slot, p_keep
        USING ERRCODE = 'invalid_parameter_value', HINT = 'Give the tick of a run that is due now, or keep runs for longer.';
    END IF;
    IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
      DELETE FROM pgxlock_runs o WHERE o.ctid = ANY (ARRAY(
        SELECT d.ctid FROM pgxlock_runs d WHERE d.keep_until < v_now LIMIT 16 FOR UPDATE SKIP LOCKED));
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_start_run(text, timestamptz, interval, interval, text, interval, text, text, text) IS
    'pgxlock, internal: starts a run; attempt is NULL if it may not be started. Once this has committed no other caller starts '
    'it. A repeated call by the same holder gets the same answer. In a transaction of its own. other_period, other_offset and '
    'other_zone: as pgxlock_run_near() says.';

  CREATE OR REPLACE FUNCTION pgxlock_finish_run(p_key text, p_slot timestamptz, p_holder text, p_state text, p_error text)
  RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    IF p_slot IS NULL OR (p_state IN ('succeeded', 'failed', 'withdrawn')) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_slot must not be NULL, and p_state succeeded, failed or withdrawn, it is %',
          coalesce(p_state, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pgxlock_durable(true);
    UPDATE pgxlock_runs o SET state = p_state, finished_at = clock_timestamp(), error = left(p_error, 2000)
     WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = p_slot AND o.holder = p_holder COLLATE "C" AND o.state = 'running';
    RETURN FOUND OR EXISTS (SELECT FROM pgxlock_runs o WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = p_slot
                               AND o.holder = p_holder COLLATE "C" AND o.state = p_state COLLATE "C");
  END $$;
  COMMENT ON FUNCTION pgxlock_finish_run(text, timestamptz, text, text, text) IS
    'pgxlock, internal: ends an attempt; false if it is not the current one. A repeated call gets the same answer.';

  ------------------------------------------------------------------- slots --
  -- Slots are counted from Monday, 1 January of the year 1, as time.Time.Truncate does in Go.
  -- Periods of whole days begin at midnight, plus the offset, by the clocks of the time zone, and
  -- so last an hour less or more where these change. An offset that the clocks skip is read as
  -- before the change, one that they show twice means the second time: both as PostgreSQL reads
  -- them.
  CREATE OR REPLACE FUNCTION pgxlock_slot(p_at timestamptz, p_period interval, p_offset interval, p_time_zone text,
    p_ahead integer)
  RETURNS timestamptz
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
  DECLARE
    c_day    CONSTANT bigint := 86400000000;                       -- in microseconds, like everything here
    c_epoch  CONSTANT bigint := 62135596800000000;                 -- from year 1 to 1970
    v_period bigint;
    v_offset bigint;
    v_slot   bigint;
    v_local  timestamp;
    v_begins timestamptz;
  BEGIN
    IF p_period IS NULL OR extract(month FROM p_period) <> 0::numeric OR extract(year FROM p_period) <> 0::numeric
       OR p_period < interval '1 millisecond' OR p_period > interval '36500 days' THEN
      RAISE EXCEPTION 'p_period must be between 1 ms and 36500 days, without months, it is %', coalesce(p_period::text, 'NULL')
        USING ERRCODE = 'invalid_parameter_value',
              HINT = 'Months have no one length: compute their beginning yourself, and call start_run_at().';
    END IF;
    IF p_offset IS NULL OR extract(month FROM p_offset) <> 0::numeric OR extract(year FROM p_offset) <> 0::numeric
       OR p_offset < interval '0' OR p_offset >= p_period THEN
      RAISE EXCEPTION 'p_offset must be at least 0 and less than p_period, it is %', coalesce(p_offset::text, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pgxlock_require(char_length(p_time_zone) <= 255, 'p_time_zone must not be NULL, nor have more than 255 characters');
    v_period := (extract(epoch FROM p_period) * 1000000::numeric)::bigint;
    v_offset := (extract(epoch FROM p_offset) * 1000000::numeric)::bigint;

    IF v_period % c_day <> 0::bigint THEN
      IF p_time_zone <> 'UTC' COLLATE "C" THEN
        RAISE EXCEPTION 'p_time_zone is %, but p_period, %, is not a number of whole days', quote_literal(p_time_zone), p_period
          USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave p_time_zone out: such periods are as long in every time zone.';
      END IF;
      v_slot := ((extract(epoch FROM p_at) * 1000000::numeric)::bigint + c_epoch - v_offset) / v_period + p_ahead::bigint;
      RETURN timestamptz '1970-01-01 00:00:00+00' + (v_slot * v_period + v_offset - c_epoch)::float8 * interval '1 microsecond';
    END IF;

    v_local := timezone(p_time_zone, p_at);
    v_slot := ((extract(epoch FROM v_local) * 1000000::numeric)::bigint + c_epoch - v_offset) / v_period;
    -- Where the clocks change, the day may begin an hour later than they show.
    v_begins := timezone(p_time_zone,
                         timestamp '1970-01-01 00:00:00' + (v_slot * v_period + v_offset - c_epoch)::float8
                         * interval '1 microsecond');
    IF v_begins > p_at THEN
      v_slot := v_slot - 1::bigint;
    END IF;
    v_slot := v_slot + p_ahead::bigint;
    RETURN timezone(p_time_zone,
                    timestamp '1970-01-01 00:00:00' + (v_slot * v_period + v_offset - c_epoch)::float8
                    * interval '1 microsecond');
  END $$;
  COMMENT ON FUNCTION pgxlock_slot(timestamptz, interval, interval, text, integer) IS
    'pgxlock, internal: the beginning of the period that contains p_at, or of the one p_ahead periods later.';

  PERFORM pgxlock_migrate('made'::text, 6, v_path);
END $migration$;
