-- Leases: the table distributed_locks, the functions that take, renew, fence and
-- release them, and the fencing tokens. Adopts in place a table and functions
-- of the same names that have the classic five columns.
--
-- Run it by golang-migrate, by `psql -f` (with or without -1), by
-- `pgxlock migrate up` or by migrations.Up; it installs into the schema that
-- search_path names first. The whole file is ONE statement, so that each of
-- these ways runs all of it or nothing, whatever the client does after an
-- error, and so that the local settings hold for all of it.
--
-- Rules for all that stands below:
--   * Every function pins search_path to this schema and pg_temp. pg_catalog is
--     then searched first without being named; naming it would put it last.
--   * Where somebody else may create objects in this schema, an operator or
--     function whose argument types match exactly beats one of pg_catalog that
--     needs a cast: =(varchar,varchar) would beat =(text,text). So names and
--     holders are handled as text, and no call below relies on a cast.
--   * The time is clock_timestamp(), read after the lock that makes it final:
--     now() stands still in a transaction. Live means expires_at > clock.
--   * Whatever locks a row or a key before it knows that it may keep it does so
--     in a subtransaction that it rolls back by raising LK900, so that a failed
--     try leaves no lock behind in the caller's transaction.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_rest   pg_catalog.text := v_path;
  v_first  pg_catalog.text;
  v_table  pg_catalog.oid;
  v_shape  pg_catalog.text;
  v_undo   pg_catalog.text[];
  v_foreign pg_catalog.text;
  v_was_here pg_catalog.bool;               -- pgxlock, of which somebody dropped a part that is to be made anew
  v_is_ours  pg_catalog.bool := false;      -- distributed_locks, though pgxlock_epoch is gone
  v_tokens_are_gone pg_catalog.bool;

  -- Whoever may create objects in the schema could make some of ours before us,
  -- with triggers on them, and would still own what CREATE OR REPLACE replaces.
  -- Asked first, for a clear answer; and again when all is made and nothing was
  -- read or written but definitions. From there on all is ours, and nobody else
  -- can change it.
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
                            "pgxlock_timeline()", "pgxlock_system_identifier()", "pgxlock_key(text, text)", "pgxlock_next_token()",
                            "pgxlock_check(text, text)", "pgxlock_ttl(interval)", "pgxlock_durable()", "pgxlock_check_unused()",
                            "pgxlock_renew(text, text, bigint, interval)", "pgxlock_release(text, text, bigint)"}'::text[]) f (signature)
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
            HINT = 'If that role is the one that owns pgxlock, or the table to adopt, SET ROLE to it and run this again; else drop them.';
  END IF;

  ------------------------------------------------------------------ tables --
  v_table := to_regclass(pg_catalog.format('%I.distributed_locks', v_schema))::oid;     -- no temporary table
  v_tokens_are_gone := to_regclass(pg_catalog.format('%I.pgxlock_tokens', v_schema)) IS NULL;
  v_was_here := NOT v_tokens_are_gone OR to_regprocedure(pg_catalog.format('%I.pgxlock_next_token()', v_schema)) IS NOT NULL;
  IF v_table IS NOT NULL AND to_regclass(pg_catalog.format('%I.pgxlock_epoch', v_schema)) IS NULL THEN   -- it is not ours, or was
    SELECT string_agg(a.attname::text || ' ' || format_type(a.atttypid, NULL::integer), ', ' ORDER BY a.attname)
           || (SELECT coalesce(string_agg(', primary key ' || k.attname::text, ''), '') FROM pg_index i
                 JOIN pg_attribute k ON k.attrelid = v_table AND k.attnum = ANY (i.indkey::int2[])
                WHERE i.indrelid = v_table AND i.indisprimary)
      INTO v_shape FROM pg_attribute a
     WHERE a.attrelid = v_table AND a.attnum > 0::int2 AND NOT a.attisdropped;
    v_is_ours := v_was_here AND position(', fencing_token bigint' IN v_shape) > 0;
    IF v_is_ours THEN
      v_shape := replace(v_shape, ', fencing_token bigint', '');
    END IF;
    IF v_shape IS DISTINCT FROM 'acquired_at timestamp with time zone, expires_at timestamp with time zone, holder_id character varying, '
        || 'lock_name character varying, metadata jsonb, primary key lock_name' THEN
      RAISE EXCEPTION 'pgxlock: the table %.distributed_locks exists and cannot be adopted: it has %', quote_ident(v_schema), v_shape
        USING ERRCODE = 'duplicate_table', HINT = 'Install into another schema, or rename that table.';
    END IF;
    -- Changing it evaluates what its owner put into it.
    IF (SELECT c.relowner FROM pg_class c WHERE c.oid = v_table) <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user) THEN
      RAISE EXCEPTION 'pgxlock: the table %.distributed_locks belongs to another role', quote_ident(v_schema)
        USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to its owner and run this again, or install into another schema.';
    END IF;
    -- What the down file runs to give back the table as it was.
    SELECT pg_catalog.array_agg(u.statement) INTO v_undo FROM (
        SELECT coalesce(pg_get_functiondef(to_regprocedure(f.signature)::oid), 'DROP FUNCTION ' || f.signature) AS statement
          FROM (VALUES ('acquire_lock(varchar, varchar, integer, jsonb)'), ('release_lock(varchar, varchar)')) f (signature)
        UNION ALL
        SELECT pg_get_indexdef(i.indexrelid) FROM pg_index i WHERE i.indexrelid = to_regclass('idx_locks_expires')::oid AND i.indrelid = v_table
        UNION ALL
        SELECT 'ALTER TABLE distributed_locks ALTER COLUMN ' || quote_ident(a.attname::text) || ' DROP NOT NULL'
          FROM pg_attribute a WHERE a.attrelid = v_table AND a.attname::text IN ('holder_id', 'expires_at') AND NOT a.attnotnull
        UNION ALL
        SELECT 'ALTER TABLE distributed_locks ALTER COLUMN lock_name TYPE ' || format_type(a.atttypid, a.atttypmod)
               || ' COLLATE ' || a.attcollation::regcollation::text
          FROM pg_attribute a WHERE a.attrelid = v_table AND a.attname = 'lock_name'
        UNION ALL
        SELECT 'ALTER TABLE distributed_locks SET (' || pg_catalog.array_to_string(c.reloptions, ', ') || ')'
          FROM pg_class c WHERE c.oid = v_table AND c.reloptions IS NOT NULL) u
     WHERE NOT v_is_ours;
  END IF;

  -- A row exists from acquire to release; expired rows stay until somebody takes
  -- them over or reaps them. No index on expires_at: with one, no renewal could
  -- be a heap-only update. fillfactor leaves room for one, and truncating an
  -- often empty table would take an ACCESS EXCLUSIVE lock again and again.
  CREATE TABLE IF NOT EXISTS distributed_locks (
    lock_name     varchar(255) COLLATE "C" PRIMARY KEY,
    holder_id     varchar(255) NOT NULL,
    acquired_at   timestamptz  NOT NULL DEFAULT now(),
    expires_at    timestamptz  NOT NULL,
    metadata      jsonb        DEFAULT '{}',
    fencing_token bigint       NOT NULL DEFAULT 0
  );
  IF v_undo IS NOT NULL THEN
    ALTER TABLE distributed_locks ADD COLUMN fencing_token bigint NOT NULL DEFAULT 0,
      ALTER COLUMN holder_id SET NOT NULL, ALTER COLUMN expires_at SET NOT NULL;
    IF EXISTS (SELECT FROM pg_index i WHERE i.indexrelid = to_regclass('idx_locks_expires')::oid AND i.indrelid = v_table) THEN
      DROP INDEX idx_locks_expires;
    END IF;
    -- Names are compared as bytes: with a collation of the C library or of ICU
    -- an upgrade of that library corrupts the unique index, which then lets one
    -- name in twice.
    BEGIN
      ALTER TABLE distributed_locks ALTER COLUMN lock_name TYPE varchar(255) COLLATE "C";
    EXCEPTION WHEN feature_not_supported THEN            -- a view or rule uses the column
      CREATE UNIQUE INDEX IF NOT EXISTS distributed_locks_lock_name_c ON distributed_locks (lock_name COLLATE "C");
      RAISE WARNING 'pgxlock: %.distributed_locks.lock_name keeps its collation, because a view or rule depends on it; a second unique index by bytes guards it',
        quote_ident(v_schema);
    END;
  END IF;
  ALTER TABLE distributed_locks SET (fillfactor = 45, vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

  -- Tokens. CACHE 1 and logged: a cached or unlogged sequence is not monotonic.
  CREATE SEQUENCE IF NOT EXISTS pgxlock_tokens AS bigint MAXVALUE 1099511627775 CACHE 1;      -- 2^40 - 1
  CREATE TABLE IF NOT EXISTS pgxlock_epoch (
    singleton         boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    system_identifier bigint  NOT NULL,     -- of the cluster that the tokens were drawn on
    epoch_base        bigint  NOT NULL,     -- added to the timeline: grows when a repair is needed
    timeline          bigint  NOT NULL,     -- the highest that a token was drawn on
    undo              text[]                -- distributed_locks was there before us: how the down file restores it
  );

  -- The version, in golang-migrate's own format, so that whatever tool ran this
  -- file, every other one knows that it ran.
  BEGIN
    CREATE TABLE IF NOT EXISTS pgxlock_migrations (version bigint NOT NULL PRIMARY KEY, dirty boolean NOT NULL);
  EXCEPTION WHEN duplicate_table OR duplicate_object OR unique_violation THEN
    NULL;                                   -- golang-migrate just made it
  END;

  -- What tells a promoted standby and another cluster apart. Where an engine
  -- refuses these functions, that part of the token is a constant.
  BEGIN
    PERFORM pg_walfile_name(pg_current_wal_insert_lsn());
    CREATE OR REPLACE FUNCTION pgxlock_timeline() RETURNS bigint LANGUAGE sql VOLATILE
    RETURN ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint;
  EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function OR object_not_in_prerequisite_state THEN
    RAISE WARNING 'pgxlock: this server does not tell its timeline (%): fencing tokens may repeat after a failover that loses commits', SQLERRM;
    CREATE OR REPLACE FUNCTION pgxlock_timeline() RETURNS bigint LANGUAGE sql VOLATILE RETURN 1::bigint;
  END;
  BEGIN
    PERFORM system_identifier FROM pg_control_system();
    CREATE OR REPLACE FUNCTION pgxlock_system_identifier() RETURNS bigint LANGUAGE sql STABLE
    RETURN (pg_control_system()).system_identifier;
  EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RAISE WARNING 'pgxlock: this server does not tell its system identifier (%): a copy of this database to another cluster will not be noticed', SQLERRM;
    CREATE OR REPLACE FUNCTION pgxlock_system_identifier() RETURNS bigint LANGUAGE sql STABLE RETURN 0::bigint;
  END;

  -------------------------------------------------------------------- keys --
  CREATE OR REPLACE FUNCTION advisory_lock_key(p_name text) RETURNS bigint
  LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
  RETURN ('x' || encode(substr(sha256(convert_to(p_name, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint;

  -- Keys of ours hash a zero byte first, which no text can contain, and the
  -- table, so that no key of a user and no other installation can equal them.
  CREATE OR REPLACE FUNCTION pgxlock_key(p_space text, p_name text) RETURNS bigint
  LANGUAGE sql STABLE PARALLEL SAFE
  RETURN ('x' || encode(substr(sha256(decode('00', 'hex') || convert_to(p_space, 'UTF8'::name) || decode('00', 'hex')
      || oidsend('distributed_locks'::regclass::oid) || convert_to(p_name, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint;

  ------------------------------------------------------------------ tokens --
  -- SECURITY DEFINER: roles that were granted the table long ago have no grant
  -- on the sequence.
  CREATE OR REPLACE FUNCTION pgxlock_next_token() RETURNS bigint
  LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
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

  CREATE OR REPLACE FUNCTION repair_lock_tokens() RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_epoch record;
    v_highest bigint;
    v_seen bigint;
    v_timeline bigint := pgxlock_timeline();
    v_system bigint := pgxlock_system_identifier();
  BEGIN
    FOR i IN 1..2 LOOP
      SELECT e.system_identifier, e.epoch_base, e.timeline, e.undo INTO STRICT v_epoch FROM pgxlock_epoch e;
      SELECT coalesce(max(l.fencing_token), 0::bigint) INTO v_highest FROM distributed_locks l;
      IF v_epoch.system_identifier = v_system AND v_timeline >= v_epoch.timeline
         AND v_highest <= ((v_epoch.epoch_base + v_timeline) << 40) + (SELECT s.last_value FROM pgxlock_tokens s) THEN
        RETURN false;
      END IF;
      LOCK TABLE pgxlock_epoch IN ACCESS EXCLUSIVE MODE;      -- and look again: only one repairs
    END LOOP;
    v_seen := greatest(v_highest >> 40, v_epoch.epoch_base + greatest(v_epoch.timeline, v_timeline));
    IF v_seen >= 8388607 THEN
      RAISE EXCEPTION 'pgxlock: lock "%" carries token %, above which there is no room', (SELECT l.lock_name FROM distributed_locks l
          ORDER BY l.fencing_token DESC LIMIT 1), v_highest
        USING ERRCODE = 'numeric_value_out_of_range', HINT = 'No token of pgxlock is that high: remove the row, or set its fencing_token to 0.';
    END IF;
    -- TRUNCATE, not UPDATE: an older snapshot then finds nothing and is refused,
    -- instead of drawing from the old epoch.
    TRUNCATE pgxlock_epoch;
    INSERT INTO pgxlock_epoch (system_identifier, epoch_base, timeline, undo)
    VALUES (v_system, v_seen + 1 - v_timeline, v_timeline, v_epoch.undo);
    RETURN true;
  END $$;

  ----------------------------------------------------------------- acquire --
  CREATE OR REPLACE FUNCTION pgxlock_check(p_argument text, p_value text) RETURNS void
  LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
  BEGIN
    IF p_value IS NULL THEN
      RAISE EXCEPTION '% must not be NULL', p_argument USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF char_length(p_value) NOT BETWEEN 1 AND 255 THEN
      RAISE EXCEPTION '% must have 1 to 255 characters, it has %', p_argument, char_length(p_value) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_argument = 'p_holder_id' AND left(p_value, 1) = '*' THEN
      RAISE EXCEPTION 'p_holder_id must not begin with *: such holders are reserved' USING ERRCODE = 'invalid_parameter_value';
    END IF;
  END $$;

  -- A ttl is a time that passes, whatever days and months are in the session's
  -- time zone.
  CREATE OR REPLACE FUNCTION pgxlock_ttl(p_ttl interval) RETURNS interval
  LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
  BEGIN
    IF p_ttl IS NULL OR p_ttl <= interval '0' OR p_ttl > interval '100 years' THEN
      RAISE EXCEPTION 'p_ttl (or p_ttl_seconds) must be more than 0 and at most 100 years, it is %', coalesce(p_ttl::text, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN pg_catalog.make_interval(secs => pg_catalog.date_part('epoch'::text, p_ttl));
  END $$;

  -- An acknowledged lease must survive a crash, whatever the role is set to.
  -- Only raised, and only to the end of the transaction.
  CREATE OR REPLACE FUNCTION pgxlock_durable() RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    IF current_setting('synchronous_commit') IN ('off', 'local') THEN
      PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
  END $$;

  CREATE OR REPLACE FUNCTION try_acquire_lock(
    p_lock_name varchar, p_holder_id varchar, p_ttl interval DEFAULT '30 seconds', p_metadata jsonb DEFAULT '{}',
    OUT acquired boolean, OUT fencing_token bigint, OUT expires_at timestamptz, OUT remaining interval, OUT held_by varchar)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_name     text  := p_lock_name;
    v_me       text  := p_holder_id;
    v_metadata jsonb := coalesce(p_metadata, jsonb '{}');
    v_ttl      interval;
    v_now      timestamptz;
    v_exists   boolean;
    v_live     boolean;
    v_timeout  text;
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
      -- A plain read: a try of a lock that is held locks and writes nothing.
      SELECT l.holder_id::text AS holder, l.expires_at AS expires, l.fencing_token AS token INTO r
        FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
      v_exists := FOUND;
      v_now := clock_timestamp();
      held_by := r.holder; expires_at := r.expires; remaining := CASE WHEN isfinite(r.expires) THEN r.expires - v_now END;
      v_live := v_exists AND r.expires > v_now;
      IF v_live AND r.holder IS DISTINCT FROM v_me COLLATE "C" THEN
        RETURN;
      END IF;

      PERFORM pgxlock_durable();
      BEGIN
        IF v_exists THEN
          -- Mine: a renewal, which fences let pass. Expired: a take-over, which
          -- they do not. Judged again on the row as it is once locked.
          IF v_live THEN
            SELECT l.holder_id::text AS holder, l.expires_at AS expires, l.fencing_token AS token INTO r
              FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C" FOR NO KEY UPDATE SKIP LOCKED;
          ELSE
            IF NOT pg_try_advisory_xact_lock(pgxlock_key('pin', v_name)) THEN
              RAISE EXCEPTION USING ERRCODE = 'LK900';
            END IF;
            SELECT l.holder_id::text AS holder, l.expires_at AS expires, l.fencing_token AS token INTO r
              FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C" FOR UPDATE SKIP LOCKED;
          END IF;
          IF NOT FOUND OR v_live <> (r.expires > clock_timestamp()) OR v_live AND r.holder IS DISTINCT FROM v_me COLLATE "C" THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
          IF v_live THEN
            -- The default metadata is no wish to erase what an earlier call stored.
            v_now := clock_timestamp();
            UPDATE distributed_locks l
               SET expires_at = v_now + v_ttl, metadata = CASE WHEN v_metadata = jsonb '{}' THEN l.metadata ELSE v_metadata END
             WHERE l.lock_name::text = v_name COLLATE "C";
            fencing_token := r.token;
          ELSE
            fencing_token := pgxlock_next_token();
            IF fencing_token <= r.token THEN
              RAISE EXCEPTION 'pgxlock: lock "%" carries token %, but the next one is %', v_name, r.token, fencing_token
                USING ERRCODE = 'LK003',
                      HINT = 'Rows were restored without the sequence. Run migrations.Up, or pgxlock migrate up, or SELECT repair_lock_tokens() once.';
            END IF;
            v_now := clock_timestamp();
            UPDATE distributed_locks l
               SET holder_id = v_me, acquired_at = v_now, expires_at = v_now + v_ttl, metadata = v_metadata,
                   fencing_token = try_acquire_lock.fencing_token
             WHERE l.lock_name::text = v_name COLLATE "C";
          END IF;
        ELSE
          -- The guard is what two inserters of one name meet on: a second INSERT
          -- would wait for the first one's transaction. Read again under it.
          IF NOT pg_try_advisory_xact_lock(pgxlock_key('guard', v_name)) THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
          PERFORM FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
          IF FOUND OR NOT pg_try_advisory_xact_lock(pgxlock_key('pin', v_name)) THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
        END IF;
        acquired := true;
      EXCEPTION WHEN SQLSTATE 'LK900' THEN
        fencing_token := NULL;
      END;

      IF acquired AND NOT v_exists THEN
        -- Outside the subtransaction: it would cost every acquire an xid more.
        fencing_token := pgxlock_next_token();
        v_now := clock_timestamp();
        IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
          INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
          VALUES (v_name, v_me, v_now, v_now + v_ttl, v_metadata, try_acquire_lock.fencing_token)
          ON CONFLICT DO NOTHING;
          acquired := FOUND;                -- false: written behind our back
        ELSE
          -- An old snapshot hides a row that came since: 40001. INSERT would wait
          -- first for whoever is just renewing that row, so the wait is bounded.
          BEGIN
            v_timeout := current_setting('lock_timeout');
            PERFORM set_config('lock_timeout', '10ms', true);
            INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
            VALUES (v_name, v_me, v_now, v_now + v_ttl, v_metadata, try_acquire_lock.fencing_token)
            ON CONFLICT DO NOTHING;         -- 40001, not 23505
            acquired := FOUND;
            PERFORM set_config('lock_timeout', v_timeout, true);
          EXCEPTION WHEN lock_not_available THEN
            RAISE EXCEPTION 'could not serialize access: lock "%" was taken after this transaction''s snapshot', v_name
              USING ERRCODE = 'serialization_failure';
          END;
        END IF;
      END IF;
      IF acquired THEN
        held_by := v_me; expires_at := v_now + v_ttl; remaining := v_ttl;
        RETURN;
      END IF;
      fencing_token := NULL;
    END LOOP;
  END $$;

  CREATE OR REPLACE FUNCTION acquire_lock(
    p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer DEFAULT 30, p_metadata jsonb DEFAULT '{}')
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN (SELECT t.acquired FROM try_acquire_lock(p_lock_name, p_holder_id, pg_catalog.make_interval(secs => p_ttl_seconds), p_metadata) t);
  END $$;

  ----------------------------------------------------------- renew, release --
  -- p_token NULL: whatever token the holder has.
  CREATE OR REPLACE FUNCTION pgxlock_renew(p_lock_name text, p_holder_id text, p_token bigint, p_ttl interval) RETURNS timestamptz
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_expires timestamptz;
    v_ttl     interval;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', p_lock_name);
    PERFORM pgxlock_check('p_holder_id', p_holder_id);
    v_ttl := pgxlock_ttl(p_ttl);
    PERFORM FROM distributed_locks l
      WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
        AND (p_token IS NULL OR l.fencing_token = p_token) AND l.expires_at > clock_timestamp();
    IF NOT FOUND THEN
      RETURN NULL;
    END IF;
    PERFORM pgxlock_durable();
    BEGIN
      -- First wait for the row, then look at the clock: UPDATE alone judges by
      -- the time before the wait if the row comes back unchanged.
      PERFORM FROM distributed_locks l
        WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
          AND (p_token IS NULL OR l.fencing_token = p_token) FOR NO KEY UPDATE;
      UPDATE distributed_locks l SET expires_at = clock_timestamp() + v_ttl
       WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
         AND (p_token IS NULL OR l.fencing_token = p_token) AND l.expires_at > clock_timestamp()
      RETURNING l.expires_at INTO v_expires;
      IF NOT FOUND THEN                     -- lost while we waited: do not keep the next holder's row locked
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      RETURN NULL;
    END;
    RETURN v_expires;
  END $$;

  CREATE OR REPLACE FUNCTION renew_lock(p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint, p_ttl interval DEFAULT '30 seconds')
  RETURNS timestamptz LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    IF p_fencing_token IS NULL THEN
      RAISE EXCEPTION 'p_fencing_token must not be NULL' USING ERRCODE = 'invalid_parameter_value', HINT = 'extend_lock() renews without a token.';
    END IF;
    RETURN pgxlock_renew(p_lock_name::text, p_holder_id::text, p_fencing_token, p_ttl);
  END $$;

  CREATE OR REPLACE FUNCTION extend_lock(p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer DEFAULT 30)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN pgxlock_renew(p_lock_name::text, p_holder_id::text, NULL::bigint, pg_catalog.make_interval(secs => p_ttl_seconds)) IS NOT NULL;
  END $$;

  CREATE OR REPLACE FUNCTION pgxlock_release(p_lock_name text, p_holder_id text, p_token bigint) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_live boolean;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', p_lock_name);
    PERFORM pgxlock_check('p_holder_id', p_holder_id);
    PERFORM FROM distributed_locks l
      WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
        AND (p_token IS NULL OR l.fencing_token = p_token);
    IF NOT FOUND THEN
      RETURN false;
    END IF;
    PERFORM pgxlock_durable();
    BEGIN
      IF NOT pg_try_advisory_xact_lock(pgxlock_key('pin', p_lock_name)) THEN
        PERFORM FROM distributed_locks l
          WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
            AND (p_token IS NULL OR l.fencing_token = p_token) AND l.expires_at > clock_timestamp();
        IF FOUND THEN
          RAISE EXCEPTION 'lock "%" cannot be released now: a transaction that asserted it is still open', p_lock_name
            USING ERRCODE = 'lock_not_available', HINT = 'Release after that transaction has ended, or inside it, or leave the lease to its expiry.';
        END IF;
        -- It has expired: the pin's owner removes it, takes it over or, if it asserted
        -- the lock, keeps the row from all others. A snapshot shows the past: the row
        -- lock makes PostgreSQL compare it with the present (40001 if it was renewed).
        IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
          PERFORM FROM distributed_locks l WHERE l.lock_name::text = p_lock_name COLLATE "C" FOR NO KEY UPDATE SKIP LOCKED;
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      DELETE FROM distributed_locks l
       WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
         AND (p_token IS NULL OR l.fencing_token = p_token)
      RETURNING l.expires_at > clock_timestamp() INTO v_live;
      IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      RETURN false;
    END;
    RETURN v_live;
  END $$;

  CREATE OR REPLACE FUNCTION release_lock(p_lock_name varchar, p_holder_id varchar)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN pgxlock_release(p_lock_name::text, p_holder_id::text, NULL::bigint);
  END $$;

  CREATE OR REPLACE FUNCTION release_lock_fenced(p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    IF p_fencing_token IS NULL THEN
      RAISE EXCEPTION 'p_fencing_token must not be NULL' USING ERRCODE = 'invalid_parameter_value', HINT = 'release_lock() releases without a token.';
    END IF;
    RETURN pgxlock_release(p_lock_name::text, p_holder_id::text, p_fencing_token);
  END $$;

  CREATE OR REPLACE FUNCTION release_all_locks(p_holder_id varchar)
  RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_me    text := p_holder_id;
    v_name  text;
    v_count bigint := 0;
  BEGIN
    PERFORM pgxlock_check('p_holder_id', v_me);
    FOR v_name IN SELECT l.lock_name::text FROM distributed_locks l WHERE l.holder_id::text = v_me COLLATE "C" ORDER BY l.lock_name::text COLLATE "C" LOOP
      IF pgxlock_release(v_name, v_me, NULL::bigint) THEN
        v_count := v_count + 1::bigint;
      END IF;
    END LOOP;
    RETURN v_count;
  END $$;

  ------------------------------------------------------------------- fence --
  -- The pin first, the row in a LATER statement: in one statement the snapshot
  -- would be older than the pin, and a take-over between the two unseen.
  CREATE OR REPLACE FUNCTION assert_lock_held(
    p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint DEFAULT NULL, p_allow_expired boolean DEFAULT false)
  RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_name text := p_lock_name;
    v_me   text := p_holder_id;
    v_read_committed boolean := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
    v_found boolean;
    v_mine  boolean;
    v_live  boolean;
    v_timeout text;
    r      record;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', v_name);
    PERFORM pgxlock_check('p_holder_id', v_me);
    IF current_setting('transaction_read_only') = 'on' THEN
      RAISE EXCEPTION 'assert_lock_held() protects writes, and this transaction is read-only' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Begin a READ WRITE transaction on the primary; or leave the call out, because nothing can be written here.';
    END IF;
    IF NOT pg_try_advisory_xact_lock_shared(pgxlock_key('pin', v_name)) THEN
      RAISE EXCEPTION 'lock "%" is not held by "%" for this transaction: another one is taking it over or releasing it', v_name, v_me
        USING ERRCODE = 'LK001';
    END IF;
    IF v_read_committed THEN
      SELECT l.fencing_token AS token, l.holder_id::text AS holder, l.expires_at AS expires INTO r
        FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
      v_found := FOUND;
    ELSE
      -- A snapshot shows the past: the row lock makes PostgreSQL compare it with
      -- the present (40001 if somebody took the lock since). Renewals pass it.
      -- After a renewal it can wait for a row that somebody locked by hand.
      v_timeout := current_setting('lock_timeout');
      PERFORM set_config('lock_timeout', '10ms', true);
      SELECT l.fencing_token AS token, l.holder_id::text AS holder, l.expires_at AS expires INTO r
        FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C" FOR KEY SHARE SKIP LOCKED;
      v_found := FOUND;
      PERFORM set_config('lock_timeout', v_timeout, true);
      IF NOT v_found THEN
        PERFORM FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
        IF NOT FOUND THEN
          RAISE EXCEPTION 'lock "%" is not visible to this transaction''s snapshot', v_name USING ERRCODE = 'LK002',
            DETAIL = 'The snapshot is older than the acquisition, or the lock was released before it.',
            HINT = 'Acquire first, then begin the transaction, and assert in its first statement.';
        END IF;
      END IF;
    END IF;
    v_mine := v_found AND r.holder = v_me COLLATE "C" AND (p_fencing_token IS NULL OR r.token = p_fencing_token);
    v_live := v_mine AND r.expires > clock_timestamp();
    IF v_mine IS NOT TRUE OR v_live IS NOT TRUE AND p_allow_expired IS NOT TRUE THEN
      IF v_mine AND NOT v_read_committed THEN
        RAISE EXCEPTION 'lock "%" had expired at %, as far as this transaction''s snapshot shows', v_name, r.expires USING ERRCODE = 'LK002',
          HINT = 'Later renewals are not visible to it. With p_allow_expired => true an expired lock that nobody took will do.';
      END IF;
      RAISE EXCEPTION 'lock "%" is not held by "%"', v_name, v_me USING ERRCODE = 'LK001',
        DETAIL = CASE WHEN NOT v_found AND v_read_committed THEN 'There is no lease of that name: it was released, or never acquired, or that has not committed.'
                      WHEN NOT v_found THEN 'Somebody has its row locked.'
                      WHEN v_mine THEN 'It expired at ' || r.expires::text || '.'
                      ELSE pg_catalog.concat('It is held by "', r.holder, '" with token ', r.token, '.') END;
    END IF;
    RETURN r.token;
  END $$;

  ------------------------------------------------------------ housekeeping --
  CREATE OR REPLACE FUNCTION reap_expired_locks(p_grace interval DEFAULT '1 hour', p_limit integer DEFAULT 1000)
  RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_name  text;
    v_count bigint := 0;
  BEGIN
    IF p_grace IS NULL OR p_grace < interval '0' THEN
      RAISE EXCEPTION 'p_grace must be 0 or more' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 THEN          -- each takes an advisory lock until commit
      RAISE EXCEPTION 'p_limit must be between 1 and 10000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOR v_name IN SELECT l.lock_name::text FROM distributed_locks l WHERE l.expires_at <= clock_timestamp() - p_grace LIMIT p_limit LOOP
      BEGIN
        IF NOT pg_try_advisory_xact_lock(pgxlock_key('pin', v_name)) THEN
          RAISE EXCEPTION USING ERRCODE = 'LK900';
        END IF;
        PERFORM FROM distributed_locks l
          WHERE l.lock_name::text = v_name COLLATE "C" AND l.expires_at <= clock_timestamp() - p_grace FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
          RAISE EXCEPTION USING ERRCODE = 'LK900';
        END IF;
        DELETE FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
        v_count := v_count + 1::bigint;
      EXCEPTION WHEN SQLSTATE 'LK900' THEN
        NULL;                               -- fenced, locked, taken or renewed: not ours to remove
      END;
    END LOOP;
    RETURN v_count;
  END $$;

  CREATE OR REPLACE VIEW lock_leases AS
    SELECT l.lock_name,
           CASE WHEN l.expires_at > c.clock THEN 'live'
                WHEN l.expires_at > c.clock - interval '1 hour' THEN 'expired'
                ELSE 'abandoned' END AS state,
           l.holder_id,
           l.fencing_token,
           CASE WHEN isfinite(l.acquired_at) THEN c.clock - l.acquired_at END AS held_for,
           CASE WHEN isfinite(l.expires_at) THEN l.expires_at - c.clock END AS remaining,
           l.acquired_at,
           l.expires_at,
           l.metadata
      FROM distributed_locks l, LATERAL (SELECT clock_timestamp() AS clock) c;

  -- What the down files ask before they remove anything: the first of them runs alone,
  -- and what is in use may be what only a later one removes. A version below the newest
  -- has not all of the tables.
  CREATE OR REPLACE FUNCTION pgxlock_check_unused() RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_schema text := quote_ident(current_schema()::text);
    v_use    record;
    v_count  bigint;
  BEGIN
    IF coalesce(current_setting('pgxlock.force', true), '') = 'on' THEN
      RETURN;
    END IF;
    FOR v_use IN SELECT * FROM (VALUES
        ('live shares of leases', 'distributed_lock_shares', 'expires_at > clock_timestamp()', 'Stop their holders, or wait until they have run out; or leave them to that'),
        ('live leases', 'distributed_locks', 'expires_at > clock_timestamp()', 'Stop their holders; or remove the leases under them'),
        ('claims', 'pgxlock_claims', 'expires_at IS NULL OR expires_at > clock_timestamp()', 'Without them what was done once can be done again. To drop them'),
        ('runs', 'pgxlock_runs', 'keep_until > clock_timestamp()', 'Without them what has run can run again. To forget them'),
        ('session locks with tokens', 'pgxlock_session_locks', 'NOT pg_try_advisory_xact_lock_shared(pgxlock_session_key(session))',
         'Stop their holders; or leave them without their fences')) u (what, relation, condition, remedy)
    LOOP
      IF to_regclass(v_schema || '.' || v_use.relation) IS NOT NULL THEN            -- no temporary table
        EXECUTE 'SELECT count(*) FROM ' || v_use.relation || ' WHERE ' || v_use.condition INTO v_count;
        IF v_count > 0::bigint THEN
          RAISE EXCEPTION 'pgxlock: % in schema %: %', v_use.what, v_schema, v_count
            USING ERRCODE = 'object_in_use',
                  HINT = v_use.remedy || ': pgxlock migrate down --force, or SET pgxlock.force = on before the file.';
        END IF;
      END IF;
    END LOOP;
  END $$;

  -- What a Locker asks at its first use; a function, so that roles which were
  -- only ever granted distributed_locks may ask too.
  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 1::bigint;

  ---------------------------------------------------------------- comments --
  COMMENT ON TABLE distributed_locks IS 'pgxlock: leases. A row exists from acquire to release; it is held while expires_at > clock_timestamp(). Write it only through the functions.';
  COMMENT ON COLUMN distributed_locks.fencing_token IS 'Grows with every acquisition of the name; a resource that refuses smaller tokens than it has seen cannot be written by a late holder.';
  COMMENT ON TABLE pgxlock_migrations IS 'pgxlock: version of this schema, in golang-migrate''s format.';
  COMMENT ON TABLE pgxlock_epoch IS 'pgxlock: which cluster and timeline the fencing tokens were drawn on.';
  COMMENT ON SEQUENCE pgxlock_tokens IS 'pgxlock: the low 40 bits of fencing tokens.';
  COMMENT ON VIEW lock_leases IS 'pgxlock: leases as an operator reads them. live; expired: may be taken over; abandoned: expired for more than an hour, wanted by nobody.';
  COMMENT ON FUNCTION acquire_lock(varchar, varchar, integer, jsonb) IS
    'Takes the lease p_lock_name for p_ttl_seconds if it is free or expired; true if p_holder_id has it now. Never waits. The same holder while live renews and keeps its token; two callers that share a holder id are one holder. Takes effect with the commit of the calling transaction. Above READ COMMITTED it may raise 40001: call it in a transaction of its own.';
  COMMENT ON FUNCTION try_acquire_lock(varchar, varchar, interval, jsonb) IS
    'Like acquire_lock, with the fencing token. Not acquired: held_by, expires_at and remaining tell of the holder (NULL while an acquisition is being committed).';
  COMMENT ON FUNCTION renew_lock(varchar, varchar, bigint, interval) IS
    'Sets the expiry to now + p_ttl and returns it; NULL if the lease with that token expired, was released or was taken over, or, above READ COMMITTED, is not visible as held to the snapshot. Waits for another renewal of the same lease: renew several in one order, by name.';
  COMMENT ON FUNCTION extend_lock(varchar, varchar, integer) IS
    'Like renew_lock, for whatever token the holder has: false if it no longer holds the lease.';
  COMMENT ON FUNCTION release_lock(varchar, varchar) IS
    'Gives the lease back. True if it was still live; false if it had expired or is not the holder''s. Raises 55P03 for a live lease while a transaction that called assert_lock_held is open.';
  COMMENT ON FUNCTION release_lock_fenced(varchar, varchar, bigint) IS
    'Like release_lock, for the acquisition with that fencing token only.';
  COMMENT ON FUNCTION release_all_locks(varchar) IS
    'Gives back every lease of the holder, or none (55P03) while a live one is asserted by an open transaction. Returns how many were still live.';
  COMMENT ON FUNCTION assert_lock_held(varchar, varchar, bigint, boolean) IS
    'Call it first in the transaction that writes under the lease: raises LK001 if the holder no longer has it, and until this transaction ends nobody can take it over. Never waits; does not block renewals. Above READ COMMITTED LK002: the snapshot is older than the acquisition. A savepoint that is rolled back takes the protection with it.';
  COMMENT ON FUNCTION advisory_lock_key(text) IS
    'The bigint key of a name for PostgreSQL''s advisory lock functions: the first 8 bytes, big endian, of the SHA-256 of its UTF-8 form. The same in every database encoding and in Go (AdvisoryID).';
  COMMENT ON FUNCTION reap_expired_locks(interval, integer) IS
    'Housekeeping only: removes up to p_limit leases that expired more than p_grace ago, and returns how many. Acquiring never needs it; tokens do not depend on it.';
  COMMENT ON FUNCTION repair_lock_tokens() IS
    'After pg_upgrade, or a restore into another cluster: lifts the fencing tokens above every one seen, so that acquires (LK003 until then) go on. True if there was something to do. For the owner of the functions.';
  COMMENT ON FUNCTION pgxlock_schema_version() IS 'pgxlock: version of this schema.';
  COMMENT ON FUNCTION pgxlock_timeline() IS 'pgxlock, internal: the server''s timeline; grows with every promotion.';
  COMMENT ON FUNCTION pgxlock_system_identifier() IS 'pgxlock, internal: which cluster this is.';
  COMMENT ON FUNCTION pgxlock_key(text, text) IS 'pgxlock, internal: advisory keys of its own, which no key of a user can equal.';
  COMMENT ON FUNCTION pgxlock_next_token() IS 'pgxlock, internal: draws a fencing token; call it only with the row or the guard locked.';
  COMMENT ON FUNCTION pgxlock_check(text, text) IS 'pgxlock, internal: raises 22023 for a bad name or holder.';
  COMMENT ON FUNCTION pgxlock_ttl(interval) IS 'pgxlock, internal: the ttl in seconds; raises 22023 for a bad one.';
  COMMENT ON FUNCTION pgxlock_durable() IS 'pgxlock, internal: raises synchronous_commit for this transaction if it is off or local.';
  COMMENT ON FUNCTION pgxlock_check_unused() IS 'pgxlock, internal: raises 55006 while leases are live, claims stand or runs are remembered.';
  COMMENT ON FUNCTION pgxlock_renew(text, text, bigint, interval) IS 'pgxlock, internal: renew_lock and extend_lock.';
  COMMENT ON FUNCTION pgxlock_release(text, text, bigint) IS 'pgxlock, internal: the release functions.';

  -------------------------------------------------------------------- rows --
  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN             -- made in the middle of this
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 1) THEN
    RAISE EXCEPTION 'pgxlock: schema % already has a later version (%)', quote_ident(v_schema),
        (SELECT max(m.version) FROM pgxlock_migrations m)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Nothing is to be done; to go back run the down files in reverse order.';
  END IF;

  -- Where the epoch of tokens that are in use is gone it goes on with the days since
  -- 2020, because no cluster is repaired or fails over once a day. Where their sequence
  -- is gone it begins again, in an epoch that the repair below makes of a timeline which
  -- seems to lie ahead.
  INSERT INTO pgxlock_epoch (system_identifier, epoch_base, timeline, undo)
  VALUES (pgxlock_system_identifier(), CASE WHEN v_was_here THEN (date_part('epoch'::text, clock_timestamp()) / 86400::float8)::bigint - 18262::bigint ELSE 0::bigint END,
          pgxlock_timeline(), v_undo) ON CONFLICT DO NOTHING;
  IF v_was_here AND v_tokens_are_gone THEN
    UPDATE pgxlock_epoch SET timeline = greatest(timeline, pgxlock_timeline()) + 1::bigint;
  END IF;

  -- Holders that were there before get tokens of their own.
  UPDATE distributed_locks SET fencing_token = pgxlock_next_token() WHERE fencing_token = 0;
  PERFORM repair_lock_tokens();

  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (1, false);
END $migration$;
