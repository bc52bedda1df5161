package systemtest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Where and with what an Advisory Locker works, and what it refuses rather than
// lock nothing (I12).

func TestAdvisoryLocksNeedNothingInstalled(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	testkit.UseAdvisory(t, testkit.NewAdvisory(t, db, nil), db, "k")
	if n := testkit.Query[int](t, db, "select count(*) from pg_class where relnamespace <> 'pg_catalog'::regnamespace and oid >= 16384"); n != 0 {
		t.Errorf("%d relations were made", n)
	}
}

func TestBadAdvisoryConfigurationIsRefusedByName(t *testing.T) {
	t.Parallel()
	const s = time.Second
	for name, test := range map[string]struct {
		cfg  pgxlock.AdvisoryConfig
		says string
	}{
		"a short TTL":                {pgxlock.AdvisoryConfig{TTL: s - 1}, "AdvisoryConfig.TTL"},
		"a TTL of a nanosecond":      {pgxlock.AdvisoryConfig{TTL: 1}, "AdvisoryConfig.TTL"},
		"a TTL for ever":             {pgxlock.AdvisoryConfig{TTL: 1<<63 - 1}, "24 days"},
		"a TTL of 24 days and a bit": {pgxlock.AdvisoryConfig{TTL: 24*24*time.Hour + 1}, "24 days"},
		"negative MaxLocks":          {pgxlock.AdvisoryConfig{MaxLocks: -1}, "AdvisoryConfig.MaxLocks is -1"},
		"a reserved owner":           {pgxlock.AdvisoryConfig{Owner: "*me"}, "AdvisoryConfig.Owner"},
		"an owner of 201 characters": {pgxlock.AdvisoryConfig{Owner: strings.Repeat("ö", 201)}, "AdvisoryConfig.Owner"},
		"an owner that is not UTF-8": {pgxlock.AdvisoryConfig{Owner: "me\xff"}, "AdvisoryConfig.Owner"},
		"an owner with a zero byte":  {pgxlock.AdvisoryConfig{Owner: "me\x00"}, "AdvisoryConfig.Owner"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locks, err := pgxlock.NewAdvisoryLocker(unconnected(t), &test.cfg)
			wantRefusedBy(t, pgxlock.KindAdvisory, err, "new", test.says)
			if locks != nil {
				t.Error("there is a Locker all the same")
			}
		})
	}
	_, err := pgxlock.NewAdvisoryLocker(nil, nil)
	wantRefusedBy(t, pgxlock.KindAdvisory, err, "new", "the pool is nil", "pgxpool.New")
}

// The bounds themselves are allowed, and the server takes them.
func TestLargestSettingsOfAdvisoryLocksWork(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	for name, cfg := range map[string]*pgxlock.AdvisoryConfig{
		"none": nil, "1 s": {TTL: time.Second}, "24 days": {TTL: 24 * 24 * time.Hour}, "no TTL": {TTL: -1},
		"one lock": {MaxLocks: 3}, "a long owner": {Owner: strings.Repeat("o", 200)},
	} {
		t.Run(name, func(t *testing.T) {
			locks := testkit.NewAdvisory(t, db, cfg)
			if cfg == nil || cfg.TTL != time.Second { // who stands still for most of that has lost its locks, and rightly
				testkit.UseAdvisory(t, locks, db, name)
			}
			lock := grantedInTime(t, locks, strings.Repeat("🔒", 255))
			if _, bounded := lock.Deadline(); bounded != (cfg == nil || cfg.TTL >= 0) {
				t.Errorf("it has a deadline: %t", bounded)
			}
			if lock.Token() != 0 {
				t.Errorf("token %d", lock.Token())
			}
		})
	}
}

func TestBadArgumentForAnAdvisoryLockIsRefusedBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	locks := testkit.Advisory(t, unconnected(t), nil)
	defer locks.Close(t.Context())
	for name, test := range map[string]struct {
		key         string
		opt         pgxlock.AcquireOption
		says        string
		unsupported bool
	}{
		"an empty key":            {"", pgxlock.NoWait, "the key is empty", false},
		"a key of 256 characters": {strings.Repeat("🔒", 256), pgxlock.NoWait, "the key has 256 characters", false},
		"a key with a zero byte":  {"a\x00b", pgxlock.NoWait, "the key contains a zero byte", false},
		"a key that is not UTF-8": {"a\xff", pgxlock.NoWait, "the key is not valid UTF-8", false},
		"a nil option":            {"k", nil, "an option is nil", false},
		"a mode that is none":     {"k", pgxlock.Mode(9), "Mode(9)", false},
		"TTL":                     {"k", pgxlock.TTL(time.Minute), "option pgxlock.TTL;", true},
		"Metadata":                {"k", pgxlock.Metadata("pod-7"), "option pgxlock.Metadata;", true},
	} {
		work := func(context.Context, *pgxlock.Lock) error {
			t.Error("the work was called")
			return nil
		}
		for method, call := range map[string]func() error{
			"Acquire":    func() error { _, err := locks.Acquire(t.Context(), test.key, test.opt); return err },
			"TryAcquire": func() error { _, err := locks.TryAcquire(t.Context(), test.key, test.opt); return err },
			"AcquireAll": func() error { _, err := locks.AcquireAll(t.Context(), []string{test.key}, test.opt); return err },
			"Do":         func() error { return locks.Do(t.Context(), test.key, work, test.opt) },
			"TryDo":      func() error { _, err := locks.TryDo(t.Context(), test.key, work, test.opt); return err },
		} {
			err := call()
			wantRefusedBy(t, pgxlock.KindAdvisory, err, "acquire", test.says)
			if errors.Is(err, errors.ErrUnsupported) != test.unsupported {
				t.Errorf("%s, %s: %v is ErrUnsupported: %t", name, method, err, !test.unsupported)
			}
		}
	}
}

func TestAdvisoryLockFencesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	lock := testkit.Acquire(t, testkit.NewAdvisory(t, db, nil), "k")
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	err := lock.Fence(t.Context(), tx)
	if !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%v, want ErrUnsupported", err)
	}
	wantOneLine(t, err, "AdvisoryConfig.Tokens", "LockTx")
	usable(t, tx)
}

func TestFullLockerRefusesOneMoreLock(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const most = 5
	locks := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{MaxLocks: most, Owner: "full"})
	full := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, pgxlock.ErrMaxLocks) || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%s: %v, want ErrMaxLocks", what, err)
		}
		wantOneLine(t, err, ": 5;", "AdvisoryConfig.MaxLocks")
	}
	held := testkit.AcquireMany(t, locks, most)
	for range 3 {
		for _, opts := range [][]pgxlock.AcquireOption{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.Shared}} {
			_, err := locks.Acquire(t.Context(), "more", opts...)
			full(fmt.Sprint(opts), err)
		}
		if err := held[0].Release(t.Context()); err != nil {
			t.Error(err)
		}
		_, err := locks.AcquireAll(t.Context(), []string{"a", "b"}) // there is room for one
		full("AcquireAll", err)
		if n := testkit.HeldBy(t, db, "full"); n != most-1 {
			t.Errorf("after AcquireAll %d locks, want %d", n, most-1)
		}
		for _, key := range []string{"a", "b", "more"} {
			testkit.WantFree(t, db, key, true)
		}
		held[0] = testkit.Acquire(t, locks, "again")
	}
	// Those who share a lock have one together.
	if err := held[0].Release(t.Context()); err != nil {
		t.Error(err)
	}
	for range 10 {
		testkit.Acquire(t, locks, "shared", pgxlock.Shared)
	}
	if n := testkit.HeldBy(t, db, "full"); n != most {
		t.Errorf("%d locks, want %d", n, most)
	}
}

func TestLockerLeavesRoomInASmallServersLockTable(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.On(t, "", pgtest.Private(t, pgserver.Config{Settings: map[string]string{"max_locks_per_transaction": "10", "max_connections": "20", "max_prepared_transactions": "4"}}))
	locks := testkit.NewAdvisory(t, db, nil)
	testkit.AcquireMany(t, locks, 24) // a tenth of 10 * (20 + 4)
	_, err := locks.TryAcquire(t.Context(), "more")
	if !errors.Is(err, pgxlock.ErrMaxLocks) {
		t.Errorf("%v, want ErrMaxLocks", err)
	}
	wantOneLine(t, err, ": 24;")
}

func TestFullLockTableIsNoBusyAdvisoryLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.On(t, "", pgtest.Private(t, pgserver.Config{Settings: map[string]string{"max_locks_per_transaction": "10", "max_connections": "10"}}))
	locks := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{MaxLocks: 1000, Owner: "short"})
	others := testkit.NewAdvisory(t, db, nil)
	held, theirs := testkit.AcquireMany(t, locks, 3), testkit.Acquire(t, others, "theirs")
	// A look that itself needs no place in that table.
	pids := testkit.Backends(t, db, "short")
	inServer := func() int {
		return testkit.Query[int](t, db, "select count(*) - 1 from pg_locks where locktype = 'advisory' and pid = any ($1)", pids)
	}
	if n := inServer(); n != len(held) {
		t.Fatalf("%d locks in the server, want %d", n, len(held))
	}
	filler := db.Connect(t)
	_, err := filler.Exec(t.Context(), "do $$ begin for i in 1..100000 loop perform pg_advisory_lock(7, i); end loop; end $$")
	wantSQLState(t, err, "53200")

	keys := strings.Fields("a b c d e f g h i j")
	for range 2 {
		for name, call := range map[string]func() error{
			"TryAcquire": func() error { _, err := locks.TryAcquire(t.Context(), "k"); return err },
			"Acquire":    func() error { _, err := locks.Acquire(t.Context(), "k", testkit.LongWait); return err },
			"AcquireAll": func() error { _, err := locks.AcquireAll(t.Context(), keys); return err },
			"TryDo": func() error {
				ran, err := locks.TryDo(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { return nil })
				if ran {
					t.Error("TryDo says that it ran")
				}
				return err
			},
		} {
			err := call()
			wantServerError(t, err, "53200")
			wantOneLine(t, err, "max_locks_per_transaction")
			// What some of it took is given back at once, and the caller does not wait for that.
			pgtest.Until(t, name+": the server has what is held, and nothing else", func() bool { return inServer() == len(held) })
		}
	}
	for _, lock := range append(held, theirs) {
		if err := errors.Join(lock.Err(), lock.Renew(t.Context())); err != nil {
			t.Errorf("it cost a holder its lock: %v", err)
		}
	}
	if _, err := filler.Exec(t.Context(), "select pg_advisory_unlock_all()"); err != nil {
		t.Fatal(err)
	}
	for _, lock := range append(held, theirs) {
		testkit.WantFree(t, db, lock.Key(), false)
	}
	all, err := locks.AcquireAll(t.Context(), keys)
	if err != nil {
		t.Fatal(err)
	}
	if n := inServer(); n != len(held)+len(keys) {
		t.Errorf("%d locks in the server, want %d", n, len(held)+len(keys))
	}
	if err := all.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// An engine that speaks PostgreSQL's protocol may have the functions, and not what
// they are for.
func TestStubsOfAdvisoryLocksAreRefused(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{Settings: map[string]string{"allow_system_table_mods": "on"}})
	admin := testkit.On(t, "", server)
	for name, test := range map[string]struct {
		stub  string
		ttl   time.Duration
		state string // ErrUnsupported if there is none
		says  string
	}{
		"a lock that is always granted": {
			stub: "create or replace function pg_catalog.pg_try_advisory_lock(bigint) returns boolean language sql as 'select true'",
			says: "grants advisory locks and does not keep them",
		},
		"a timeout that is ignored": {
			stub: `create function pg_catalog.real_set_config(text, text, boolean) returns text language internal as 'set_config_by_name';
				create or replace function pg_catalog.set_config(text, text, boolean) returns text language sql
				as $$select case when $1 = 'idle_session_timeout' then $2 else pg_catalog.real_set_config($1, $2, $3) end$$`,
			says: "idle_session_timeout = 30000 ms",
		},
		"a timeout that is refused": {
			stub: `create function pg_catalog.real_set_config(text, text, boolean) returns text language internal as 'set_config_by_name';
				create or replace function pg_catalog.set_config(text, text, boolean) returns text language sql
				as $$select pg_catalog.real_set_config(case when $1 = 'idle_session_timeout' then 'no_such_setting' else $1 end, $2, $3)$$`,
			state: "42704", says: "AdvisoryConfig.TTL",
		},
	} {
		t.Run(name, func(t *testing.T) {
			database := "stub_" + fmt.Sprint(len(test.stub))
			admin.Exec(t, "create database "+database)
			pool := pgtest.Pool(t, server.URL(database))
			db := &pgtest.DB{Pool: pool, URL: server.URL(database), Name: database}
			db.Exec(t, test.stub)
			locks := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "stubbed"})
			for range 2 {
				_, err := locks.Acquire(t.Context(), "k")
				if test.state != "" {
					wantServerError(t, err, test.state)
				} else if !errors.Is(err, errors.ErrUnsupported) {
					t.Errorf("%v, want ErrUnsupported", err)
				}
				wantOneLine(t, err, test.says)
			}
			pgtest.Until(t, "the refused sessions are closed", func() bool { return len(testkit.Backends(t, db, "stubbed")) == 0 })
		})
	}
}

func TestStandbyGrantsNoAdvisoryLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, primary := privateServer(t, nil)
	second := pgtest.Standby(t, server, pgserver.Config{})
	standby := testkit.On(t, "", second)
	held := testkit.Acquire(t, testkit.NewAdvisory(t, primary, nil), "held")
	locks := testkit.NewAdvisory(t, standby, &pgxlock.AdvisoryConfig{Owner: "astray"})
	for name, call := range map[string]func(key string) error{
		"Acquire":          func(key string) error { _, err := locks.Acquire(t.Context(), key); return err },
		"Acquire, MaxWait": func(key string) error { _, err := locks.Acquire(t.Context(), key, testkit.LongWait); return err },
		"TryAcquire":       func(key string) error { _, err := locks.TryAcquire(t.Context(), key); return err },
		"AcquireAll":       func(key string) error { _, err := locks.AcquireAll(t.Context(), []string{"a", key}); return err },
		"Holders":          func(key string) error { _, err := locks.Holders(t.Context(), key); return err },
		"Do": func(key string) error {
			return locks.Do(t.Context(), key, func(context.Context, *pgxlock.Lock) error {
				t.Error("the work was done")
				return nil
			})
		},
	} {
		for _, key := range []string{"free", "held"} {
			wantReadOnly(t, name+" of what is "+key, call(key))
		}
	}
	if n := testkit.AdvisoryCount(t, standby); n != 0 {
		t.Errorf("%d advisory locks on the standby", n)
	}
	for _, attrs := range []string{"any", "read-write", "primary", "prefer-standby"} {
		several := testkit.On(t, "target_session_attrs="+attrs, second, server)
		testkit.UseAdvisory(t, testkit.NewAdvisory(t, several, nil), primary, attrs)
	}
	if err := held.Err(); err != nil {
		t.Error(err)
	}
}

func TestPoolerThatSharesItsConnectionsIsRefused(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		through := &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres")), URL: pooler.URL("postgres"), Name: "postgres"}
		refused := func(cfg *pgxlock.AdvisoryConfig, says string) {
			t.Helper()
			locks := testkit.Advisory(t, through.Pool, cfg)
			for range 3 {
				_, err := locks.Acquire(t.Context(), "k", testkit.LongWait)
				if !errors.Is(err, pgxlock.ErrPooler) || errors.Is(err, pgxlock.ErrNotAcquired) {
					t.Errorf("%v, want ErrPooler", err)
				}
				wantOneLine(t, err, says)
			}
			if err := locks.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		refused(nil, "AdvisoryConfig.SessionPooler")
		cfg := &pgxlock.AdvisoryConfig{Owner: "pooled", SessionPooler: true}
		if mode != "session" {
			refused(cfg, "not in session mode")
			wantClean(t, mode, pooler, db)
			return
		}
		locks := testkit.Advisory(t, through.Pool, cfg)
		testkit.UseAdvisory(t, locks, db, "k")
		lock := testkit.Acquire(t, locks, "k")
		if _, err := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "else"}).TryAcquire(t.Context(), "k"); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("somebody else: %v", err)
		}
		testkit.Terminate(t, db, "pooled")
		pgtest.Until(t, "the lock is lost", func() bool { return lock.Err() != nil })
		wantLost(t, lock)
		testkit.UseAdvisory(t, locks, db, "k")
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
		pgtest.Until(t, "the pooler has cleaned the connections", func() bool {
			return testkit.Query[int](t, db, `select count(*) from pg_locks l join pg_stat_activity a using (pid)
				where l.locktype = 'advisory' and a.application_name <> 'pgxlock else'`) == 0
		})
	})
}

func TestEndOfASessionPoolerLosesAllLocks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	eachSessionPooler(t, server, nil, func(program string, pooler *pgserver.Pooler) {
		through := &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres"))}
		locks, others := testkit.NewAdvisory(t, through, &pgxlock.AdvisoryConfig{SessionPooler: true}), testkit.NewAdvisory(t, db, nil)
		lock := testkit.Acquire(t, locks, program)
		stopAtOnce(t, pooler)
		pgtest.Until(t, "the lock is lost", func() bool { return lock.Err() != nil })
		wantLost(t, lock)
		next := testkit.Acquire(t, others, program, testkit.LongWait)
		if err := errors.Join(next.Err(), next.Release(t.Context())); err != nil {
			t.Error(err)
		}
	})
}

// eachSessionPooler runs a test behind each PgBouncer of this machine, in session mode with the settings.
func eachSessionPooler(t *testing.T, server *pgserver.Server, settings map[string]string, test func(program string, pooler *pgserver.Pooler)) {
	t.Helper()
	programs, err := pgserver.FindPoolers()
	if err != nil {
		pgtest.Missing(t, "pooler", err)
	}
	for _, program := range programs {
		all := map[string]string{"pool_mode": "session"}
		maps.Copy(all, settings)
		pooler, err := server.Pooler(t.Context(), program, all)
		if err != nil {
			t.Fatal(err)
		}
		test(program, pooler)
		stopAtOnce(t, pooler)
	}
}

// stopAtOnce stops a pooler, also a second time, without waiting for its clients.
func stopAtOnce(t *testing.T, pooler *pgserver.Pooler) {
	t.Helper()
	atOnce, cancel := context.WithCancel(t.Context())
	cancel()
	if err := pooler.Stop(atOnce); err != nil {
		t.Fatal(err)
	}
}

// A watchedConn calls sends before it writes: no tracer sees how a connection is set up.
type watchedConn struct {
	net.Conn

	sends func([]byte)
}

func (c watchedConn) Write(message []byte) (int, error) {
	c.sends(message)
	return c.Conn.Write(message)
}

// A pooler that looked as if it was in session mode is found out by the first
// message that reaches another backend.
func TestPoolerThatTurnsOutToShareItsConnectionsLosesAllLocks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	db.Exec(t, "create database bare") // without a queue, so that no listener connects meanwhile
	pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		if mode != "transaction" {
			return
		}
		// The pooler has two connections to the server. Somebody else takes the first
		// just when the second one is looked at, and gives it back at once.
		stranger := pgtest.Connect(t, pooler.URL("bare")+"&default_query_exec_mode=exec")
		interfere := func(sql string) {
			if _, err := stranger.Exec(t.Context(), sql); err != nil {
				t.Error(err)
			}
		}
		looks := 0
		sends := func(message []byte) {
			switch {
			case bytes.Contains(message, []byte("Which backend serves")):
				if looks++; looks == 2 {
					interfere("begin; select 1")
				}
			case looks == 2 && bytes.Contains(message, []byte("idle_session_timeout")):
				interfere("rollback")
			}
		}
		pool := pgtest.Pool(t, pooler.URL("bare"), func(c *pgxpool.Config) {
			c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
			dial := c.ConnConfig.DialFunc
			c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := dial(ctx, network, address)
				return watchedConn{conn, sends}, err
			}
		})
		lock := testkit.Acquire(t, testkit.Advisory(t, pool, &pgxlock.AdvisoryConfig{SessionPooler: true}), "k")
		interfere("begin; select 1") // on the backend that has the lock
		if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) || !errors.Is(err, pgxlock.ErrPooler) {
			t.Errorf("Renew on another backend: %v, want ErrLost and ErrPooler", err)
		}
		wantLost(t, lock)
		if err := lock.Err(); !errors.Is(err, pgxlock.ErrPooler) {
			t.Errorf("%v, want ErrPooler", err)
		}
	})
}

// A pooler may lead to a standby from one message to the next; a server that was
// demoted ends its sessions.
func TestDemotedPrimaryLosesAllAdvisoryLocks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	locks := testkit.NewAdvisory(t, db, nil)
	lock := testkit.Acquire(t, locks, "k")
	if err := server.Demote(t.Context()); err != nil {
		t.Fatal(err)
	}
	pgtest.Until(t, "the lock is lost", func() bool { return lock.Err() != nil })
	wantLost(t, lock)
	_, err := locks.TryAcquire(t.Context(), "k")
	wantReadOnly(t, "TryAcquire", err)
	db = promote(t, server)
	testkit.UseAdvisory(t, locks, db, "k")
	wantLost(t, lock)
}
